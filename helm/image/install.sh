#!/bin/sh
# The image's commands: the Dockerfile and check.py run these, and nothing else installs anything.
#
#   install.sh tools   VARIANT PREFIX   the installer, pinned, beside PREFIX and not in it
#   install.sh deps    VARIANT PREFIX   a virtual environment with everything that Pagelane needs
#   install.sh package VARIANT PREFIX   Pagelane itself, and configs/
#   install.sh kernels VARIANT PREFIX   FlashInfer's modules for shapes/*, for cards of CUDA_ARCH; needs nvcc, no GPU
#   install.sh trim    VARIANT PREFIX   without what nothing here reads: torch's headers, tests and their programs
#   install.sh resolve VARIANT          what deps would install of the pins, as a list; installs nothing
#
# VARIANT is cpu or cuda. Run it in the root of the source tree. PYTHON names the interpreter of the environment,
# PYTHON_INDEX a package index to use in place of pip's own, PIP_FIND_LINKS folders with wheels that are taken first.
set -eu

here=helm/image
step=${1:?step} variant=${2:?variant} prefix=${3:-}
tools=$prefix.tools
[ -f pyproject.toml ] || { echo "install.sh: there is no pyproject.toml in $PWD: run it in the source tree's root" >&2; exit 2; }
case $variant in cpu) extra=demo ;; cuda) extra=cuda ;; *) echo "install.sh: VARIANT is $variant, but must be cpu or cuda" >&2; exit 2 ;; esac
if [ -n "${PYTHON_INDEX:-}" ]; then export PIP_INDEX_URL="$PYTHON_INDEX" UV_DEFAULT_INDEX="$PYTHON_INDEX"; fi
links=
for folder in ${PIP_FIND_LINKS:-}; do links="$links --find-links $folder"; done
pins="--constraint .ci/constraints.txt --constraint $here/$variant.txt"

uv() {
  if [ -x "$tools/bin/uv" ]; then "$tools/bin/uv" "$@"; else command uv "$@"; fi
}

into() { # into ARGUMENTS...: install into the environment; each module is compiled, since a read-only root keeps no cache
  uv pip install --quiet --compile-bytecode --link-mode copy --python "$prefix/bin/python" "$@"
}

case $step in
tools)
  "${PYTHON:-python3}" -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet --disable-pip-version-check --constraint $here/tools.txt uv
  ;;
deps)
  "${PYTHON:-python3}" -m venv --without-pip "$prefix"
  if [ "$variant" = cpu ]; then
    # The build of torch without CUDA: a wheel at hand, or the one that uv knows how to find.
    if [ -z "$links" ] || ! into --no-index --no-deps $links $pins torch; then
      into --torch-backend cpu --no-deps $pins torch
    fi
  fi
  into $pins $links --requirements pyproject.toml --extra $extra
  ;;
package)
  into --no-deps --build-constraint $here/tools.txt $links .
  cp -R configs "$prefix/configs"
  ;;
kernels)
  for shape in $here/shapes/*/; do
    for page in 16 64; do
      "$prefix/bin/pagelane" prebuild --model "$shape" --kv-page-size $page --arch "${CUDA_ARCH:?CUDA_ARCH}"
    done
  done
  # FlashInfer compiles in the home directory and copies from there.
  rm -rf "${HOME:?}/.cache/flashinfer"
  ;;
trim)
  for torch in "$prefix"/lib/python3*/site-packages/torch; do
    rm -rf "$torch/include" "$torch/test"
    find "$torch/bin" -type f ! -name torch_shm_manager -delete
  done
  ;;
resolve)
  uv pip compile --quiet --no-header --no-annotate --python-version 3.12 --python-platform x86_64-unknown-linux-gnu \
    $pins $links --extra $extra pyproject.toml
  ;;
*)
  echo "install.sh: STEP is $step, but must be tools, deps, package, kernels, trim or resolve" >&2
  exit 2
  ;;
esac
