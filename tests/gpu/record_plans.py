"""Records the plans of FlashInfer's own schedulers as test data. Needs nvcc and FlashInfer's headers, but no GPU.

    python tests/gpu/record_plans.py --include DIR/flashinfer/data --out tests/unit/golden/flashinfer_plans.json.gz

The schedulers are host code: `flashinfer_scheduler.cu` compiles them with the three CUDA calls that they make replaced.
Each line of the result holds a case and FlashInfer's answer. FA3's work lists are kept as the loads of the CTAs alone:
which CTA of equal load gets a tile depends on the C++ library's heap, and no result depends on it.
"""

import argparse
import gzip
import json
import random
import subprocess
import tempfile
from pathlib import Path
from typing import Any

Case = dict[str, Any]
VERSION = "0.6.18.post1"
SHAPES = [(32, 8, 128), (40, 8, 128), (20, 4, 128), (24, 4, 256), (16, 4, 256), (9, 3, 64), (32, 1, 128), (16, 16, 64)]
SM_COUNTS = [132, 132, 108, 84, 16]


def lengths(rng: random.Random, rows: int) -> list[int]:
    """KV lengths of `rows` rows: even, spread, or one long row among short ones."""
    kind = rng.choice(["even", "spread", "skewed", "tiny"])
    if kind == "even":
        return [rng.choice([1, 17, 512, 1024, 4096, 8191])] * rows
    if kind == "spread":
        return [rng.randint(1, 6000) for _ in range(rows)]
    if kind == "tiny":
        return [rng.randint(1, 80) for _ in range(rows)]
    short = [rng.randint(100, 1200) for _ in range(rows)]
    short[rng.randrange(rows)] = rng.randint(8000, 40000)
    return short


def fa2_case(rng: random.Random, number: int) -> Case:
    heads, kv_heads, head_dim = rng.choice(SHAPES)
    decode = number % 2 == 0
    rows = rng.choice([1, 2, 3, 7, 16, 33, 64, 100, 256] if decode else [1, 1, 2, 3, 5, 8, 20])
    kv = lengths(rng, rows)
    queries = [1] * rows if decode else [rng.choice([1, 15, 64, 100, 333, 512]) for _ in range(rows)]
    mode = rng.choice(["search", "search", "graph", "never", "fixed"])
    total = sum(queries) + (rng.randint(0, 64) if mode == "graph" and not decode else 0)
    return {
        "kind": "fa2",
        "sm_count": rng.choice(SM_COUNTS),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "page_size": rng.choice([16, 64]),
        "graph": mode == "graph",
        "fixed_pages": rng.choice([1, 4, 8, 31, 64]) if mode == "fixed" else -1,
        "no_split": mode == "never",
        "uniform": int(mode == "graph" and decode),
        "total_rows": total,
        "queries": queries,
        "lengths": [max(length, query) for length, query in zip(kv, queries, strict=True)],
    }


def fa3_case(rng: random.Random) -> Case:
    heads, kv_heads, head_dim = rng.choice(SHAPES[:6])
    rows = rng.choice([1, 1, 2, 3, 6, 12])
    queries = [rng.choice([1, 64, 128, 129, 500, 1024, 2048]) for _ in range(rows)]
    # Distinct lengths: FlashInfer sorts rows by length with an unstable sort.
    cached = rng.sample(range(0, 5000, 7), rows)
    pairs: dict[int, int] = {query + old: query for query, old in zip(queries, cached, strict=True)}
    return {
        "kind": "fa3",
        "sm_count": rng.choice([132, 132, 114]),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "page_size": rng.choice([16, 64]),
        "total_rows": sum(pairs.values()),
        "queries": list(pairs.values()),
        "lengths": list(pairs),
    }


def line(case: Case) -> str:
    """The case as `flashinfer_scheduler.cu` reads it."""
    head = [case["kind"] == "fa3", case["sm_count"], case["heads"], case["kv_heads"], case["head_dim"]]
    head += [case["page_size"], case.get("graph", 0), case.get("fixed_pages", -1), case.get("no_split", 0)]
    head += [case.get("uniform", 0), True, case["total_rows"], len(case["queries"])]
    rows = [number for pair in zip(case["queries"], case["lengths"], strict=True) for number in pair]
    return " ".join(str(int(number)) for number in [*head, *rows])


def loads(case: Case, plan: Case) -> Case:
    """FA3's answer without the names of the CTAs: the sorted loads, in KV tokens, and the number of tiles of each."""
    tile = 192 if case["head_dim"] == 64 else 128
    costs = []
    for cta in range(case["sm_count"]):
        cost = 0
        for work in range(plan["work_indptr"][cta], plan["work_indptr"][cta + 1]):
            queries, length, index = (plan[name][work] for name in ("qo_lens", "kv_lens", "qo_tile_indices"))
            last = (index + 1) * tile >= queries
            cost += 2 * tile + (length if last else max(min(length - queries + (index + 1) * tile, length), 0))
        costs.append(cost)
    return {"works": plan["work_indptr"][-1], "loads": sorted(costs), "same_schedule": plan["info"][8]}


def record(include: Path, cases: list[Case]) -> list[Case]:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "scheduler"
        source = Path(__file__).with_name("flashinfer_scheduler.cu")
        flags = ["-std=c++17", "-O1", "-arch=sm_90a", "-w"]
        folders = [include / "include", include / "cccl" / "libcudacxx" / "include", include / "spdlog" / "include"]
        subprocess.run(
            ["nvcc", *flags, *(f"-I{path}" for path in folders), str(source), "-o", str(program)],
            check=True,
        )
        text = "\n".join(line(case) for case in cases)
        done = subprocess.run([str(program)], input=text, capture_output=True, text=True, check=True)
    plans = [json.loads(answer) for answer in done.stdout.splitlines()]
    answers = [loads(c, p) if c["kind"] == "fa3" else p for c, p in zip(cases, plans, strict=True)]
    return [{**case, "plan": answer} for case, answer in zip(cases, answers, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--include", type=Path, required=True, help=f"flashinfer/data of the wheel {VERSION}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=360)
    args = parser.parse_args()
    rng = random.Random(18)
    cases = [fa3_case(rng) if number % 6 == 5 else fa2_case(rng, number) for number in range(args.cases)]
    rows = record(args.include, cases)
    text = "\n".join(json.dumps(row, separators=(",", ":")) for row in [{"flashinfer": VERSION}, *rows])
    args.out.write_bytes(gzip.compress(text.encode(), mtime=0))
    print(json.dumps({"cases": len(rows), "bytes": args.out.stat().st_size}))


if __name__ == "__main__":
    main()
