{{/* What no schema can say: comparisons of two values. Each names the thing, both numbers and the way out. */}}

{{- define "pagelane.checks" -}}
{{- $w := .Values.worker -}}
{{- $f := .Values.frontend -}}
{{- $config := $w.config -}}

{{- if kindIs "map" $w.disaggregation -}}
{{- $prefill := int $w.disaggregation.prefill -}}
{{- $decode := int $w.disaggregation.decode -}}
{{- if and (gt $prefill 0) (eq $decode 0) -}}
{{- fail (printf "worker.disaggregation has %d workers for prefill and %d for decode: prompts would be computed and nothing generated; this version of Pagelane runs both on every worker: remove worker.disaggregation and set worker.replicas to %d" $prefill $decode $prefill) -}}
{{- end -}}
{{- end -}}
{{- if not (kindIs "invalid" $w.disaggregation) -}}
{{- fail (printf "worker.disaggregation is %s, but this version of Pagelane runs prefill and decode on every worker: remove worker.disaggregation and set worker.replicas" (toJson $w.disaggregation)) -}}
{{- end -}}

{{- range $key := list "namespace" "component" "discovery_backend" -}}
{{- if hasKey $config $key -}}
{{- fail (printf "worker.config.%s is %q, but the chart sets it so that frontends find the workers: remove it%s" $key (index $config $key | toString) (ternary ", and set dynamoNamespace instead" "" (eq $key "namespace"))) -}}
{{- end -}}
{{- end -}}

{{- $need := add $w.preStopSeconds (include "pagelane.shutdownSeconds" .) | int -}}
{{- $have := include "pagelane.workerTermination" . | int -}}
{{- if le $have $need -}}
{{- fail (printf "worker.terminationGracePeriodSeconds is %d, but a drain takes up to %d: preStopSeconds %d, gracePeriodSeconds %d, worker.config.drain_timeout_s %s and 4 to end the engine core; the pod would be killed while it drains: raise worker.terminationGracePeriodSeconds above %d, leave it null, or lower worker.config.drain_timeout_s" $have $need (int $w.preStopSeconds) (int $w.gracePeriodSeconds) (include "pagelane.drainSeconds" .) $need) -}}
{{- end -}}

{{- $need := add $f.preStopSeconds $f.drainSeconds | int -}}
{{- $have := include "pagelane.frontendTermination" . | int -}}
{{- if le $have $need -}}
{{- fail (printf "frontend.terminationGracePeriodSeconds is %d, but preStopSeconds %d and drainSeconds %d together take %d; the pod would be killed while it drains: raise frontend.terminationGracePeriodSeconds above %d, leave it null, or lower frontend.drainSeconds" $have (int $f.preStopSeconds) (int $f.drainSeconds) $need $need) -}}
{{- end -}}

{{- $device := $config.device | default "auto" -}}
{{- if and (eq $device "cpu") (gt (int $w.gpu.count) 0) -}}
{{- fail (printf "worker.gpu.count is %d and worker.config.device is cpu: the GPU would lie idle; set worker.gpu.count to 0, or worker.config.device to cuda" (int $w.gpu.count)) -}}
{{- end -}}
{{- if and (ne $device "cpu") (eq (int $w.gpu.count) 0) -}}
{{- fail (printf "worker.gpu.count is 0 and worker.config.device is %s: the worker would find no GPU; set worker.gpu.count to 1, or worker.config.device to cpu" $device) -}}
{{- end -}}

{{- $bucket := int ($config.max_bucket | default 16) -}}
{{- $step := int ($config.max_step_tokens | default 512) -}}
{{- if lt $step $bucket -}}
{{- fail (printf "worker.config.max_step_tokens is %d and worker.config.max_bucket is %d, but a step must hold one token of every active request: raise max_step_tokens or lower max_bucket" $step $bucket) -}}
{{- end -}}
{{- if gt (int $config.max_chunk_tokens) $step -}}
{{- fail (printf "worker.config.max_chunk_tokens is %d and worker.config.max_step_tokens is %d, but a chunk must fit in a step: lower max_chunk_tokens or raise max_step_tokens" (int $config.max_chunk_tokens) $step) -}}
{{- end -}}

{{- include "pagelane.modelChecks" . -}}
{{- include "pagelane.extraChecks" . -}}
{{- include "pagelane.modeChecks" . -}}
{{- include "pagelane.portChecks" . -}}
{{- end -}}

{{- define "pagelane.modelChecks" -}}
{{- $model := .Values.worker.config.model -}}
{{- $source := .Values.model.source -}}
{{- $mount := trimSuffix "/" .Values.model.pvc.mountPath -}}
{{- if eq $source "pvc" -}}
{{- if not .Values.model.pvc.claimName -}}
{{- fail "model.source is pvc, but model.pvc.claimName is empty: name the PersistentVolumeClaim that holds the model, or set model.source to hub" -}}
{{- end -}}
{{- if not (or (eq $model $mount) (hasPrefix (printf "%s/" $mount) $model)) -}}
{{- fail (printf "worker.config.model is %q and model.pvc.mountPath is %q, but the model must lie on the volume: set worker.config.model to a path under %s, or model.source to hub" $model $mount $mount) -}}
{{- end -}}
{{- else if and (eq $source "hub") (hasPrefix "/" $model) -}}
{{- fail (printf "worker.config.model is %q, a path, and model.source is hub: set worker.config.model to org/name, or model.source to pvc or image" $model) -}}
{{- end -}}
{{- if .Values.model.cache.perWorker -}}
{{- if or (ne .Values.mode "plain") (ne .Values.worker.kind "StatefulSet") -}}
{{- fail (printf "model.cache.perWorker is true with mode %s and worker.kind %s, but only a StatefulSet of mode plain gives each worker a volume: set worker.kind to StatefulSet, or use model.cache.claimName" .Values.mode .Values.worker.kind) -}}
{{- end -}}
{{- if .Values.model.cache.claimName -}}
{{- fail (printf "model.cache.claimName is %q and model.cache.perWorker is true, but the cache is one volume or the other: empty the first, or set the second to false" .Values.model.cache.claimName) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pagelane.modeChecks" -}}
{{- if eq .Values.mode "dynamo" -}}
{{- if ne (int .Values.worker.systemPort) 9090 -}}
{{- fail (printf "worker.systemPort is %d, but the operator of mode dynamo takes 9090: leave it at 9090" (int .Values.worker.systemPort)) -}}
{{- end -}}
{{- if ne (int .Values.frontend.port) 8000 -}}
{{- fail (printf "frontend.port is %d, but the operator of mode dynamo takes 8000: leave it at 8000" (int .Values.frontend.port)) -}}
{{- end -}}
{{- $endpoint := .Values.worker.config.endpoint | default "generate" -}}
{{- if ne $endpoint "generate" -}}
{{- fail (printf "worker.config.endpoint is %q, but the operator of mode dynamo has /health tell of generate: remove it" $endpoint) -}}
{{- end -}}
{{- if eq .Values.worker.kind "StatefulSet" -}}
{{- fail "worker.kind is StatefulSet, but with mode dynamo the operator makes the pods: set worker.kind to Deployment, or mode to plain" -}}
{{- end -}}
{{- if eq .Values.monitoring.scrape "service" -}}
{{- fail "monitoring.scrape is service, but with mode dynamo the chart has no Services: set monitoring.scrape to pod" -}}
{{- end -}}
{{- end -}}
{{- $a := .Values.worker.autoscaling -}}
{{- if and $a.enabled (gt (int $a.minReplicas) (int $a.maxReplicas)) -}}
{{- fail (printf "worker.autoscaling.minReplicas is %d and maxReplicas is %d: raise maxReplicas or lower minReplicas" (int $a.minReplicas) (int $a.maxReplicas)) -}}
{{- end -}}
{{- if and (eq (toString .Values.worker.maxSurge) "0") (eq (toString .Values.worker.maxUnavailable) "0") -}}
{{- fail "worker.maxSurge and worker.maxUnavailable are both 0: no worker could ever be replaced; set one of them to 1" -}}
{{- end -}}
{{- end -}}

{{- define "pagelane.portChecks" -}}
{{- if eq (int .Values.worker.systemPort) (int .Values.worker.rpcPort) -}}
{{- fail (printf "worker.systemPort and worker.rpcPort are both %d: give them two ports" (int .Values.worker.rpcPort)) -}}
{{- end -}}
{{- if eq (int .Values.frontend.port) (int .Values.frontend.responseStreamPort) -}}
{{- fail (printf "frontend.port and frontend.responseStreamPort are both %d: give them two ports" (int .Values.frontend.port)) -}}
{{- end -}}
{{- end -}}

{{/* Extras may add to what the chart sets, not set it again: of two variables of one name an API server takes neither. */}}
{{- define "pagelane.extraChecks" -}}
{{- range $component := list "frontend" "worker" -}}
{{- $part := index $.Values $component -}}
{{- $set := dict -}}
{{- range fromYamlArray (include (printf "pagelane.%sEnv" $component) $) -}}{{- $_ := set $set .name true -}}{{- end -}}
{{- range $part.extraEnv -}}
{{- if hasKey $set .name -}}
{{- fail (printf "%s.extraEnv sets %s, which is set already: remove it, or use the value of the chart that it comes from" $component .name) -}}
{{- end -}}
{{- $_ := set $set .name true -}}
{{- end -}}
{{- range $part.extraVolumes -}}
{{- if has .name (list "config" "tmp" "shm" "cache" "model") -}}
{{- fail (printf "%s.extraVolumes has a volume named %s, as the chart has: give it another name" $component .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range .Values.worker.extraArgs -}}
{{- $key := trimPrefix "--" . | splitList "=" | first | replace "-" "_" -}}
{{- if and (hasPrefix "--" .) (has $key (list "config" "kv_page_size" "namespace" "component" "discovery_backend" "drain_timeout_s" "model")) -}}
{{- fail (printf "worker.extraArgs has %s, but other objects of the chart follow from it: remove it%s" . (ternary (printf ", and set worker.config.%s" $key) "" (has $key (list "kv_page_size" "drain_timeout_s" "model")))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
