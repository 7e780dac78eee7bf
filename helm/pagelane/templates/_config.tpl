{{/* The worker's YAML, and times that follow from it. */}}

{{/* A value as YAML. Helm reads numbers as floats, whose own text (1e+06) the worker would take for a word. */}}
{{- define "pagelane.scalar" -}}
{{- if kindIs "float64" . -}}
{{- if eq . (floor .) -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- else if eq (toString .) "null" -}}null
{{- else -}}{{ toJson . }}
{{- end -}}
{{- end -}}

{{- define "pagelane.workerYaml" -}}
{{- range $key, $value := .Values.worker.config -}}
{{- if not (kindIs "invalid" $value) -}}
{{ $key }}: {{ include "pagelane.scalar" $value }}
{{ end -}}
{{- end -}}
{{- end -}}

{{- define "pagelane.pageSize" -}}
{{ int (.Values.worker.config.kv_page_size | default 16) }}
{{- end -}}

{{/*
What tells the namespace of these workers from that of others: the page size, and a hash of what frontends compare. Within
a namespace a frontend refuses workers whose model card is not that of the first: until the last old one has gone, new ones
would be idle.
*/}}
{{- define "pagelane.workerSuffix" -}}
{{- $card := pick .Values.worker.config "model" "revision" "load_format" "served_model_name" "endpoint_types" "context_limit" "tool_call_parser" "reasoning_parser" "custom_jinja_template" -}}
{{ include "pagelane.pageSize" . }}-{{ toJson $card | sha256sum | trunc 8 }}
{{- end -}}

{{/* Seconds, rounded up, that running requests may take: the worker's own default where the key is left out. */}}
{{- define "pagelane.drainSeconds" -}}
{{- $drain := .Values.worker.config.drain_timeout_s -}}
{{- if kindIs "invalid" $drain -}}{{- $drain = 20 -}}{{- end -}}
{{ ceil $drain | int }}
{{- end -}}

{{/* Grace period, drain, and 4 s to end the engine core (CORE_STOP_S + CORE_KILL_S of worker/config.py). */}}
{{- define "pagelane.shutdownSeconds" -}}
{{ add .Values.worker.gracePeriodSeconds (include "pagelane.drainSeconds" .) 4 }}
{{- end -}}

{{/* Dynamo ends a worker by force after this time. */}}
{{- define "pagelane.shutdownTimeout" -}}
{{ add (include "pagelane.shutdownSeconds" .) 5 }}
{{- end -}}

{{- define "pagelane.workerTermination" -}}
{{- .Values.worker.terminationGracePeriodSeconds | default (add .Values.worker.preStopSeconds (include "pagelane.shutdownTimeout" .) 10) | int -}}
{{- end -}}

{{- define "pagelane.frontendTermination" -}}
{{- .Values.frontend.terminationGracePeriodSeconds | default (add .Values.frontend.preStopSeconds .Values.frontend.drainSeconds 10) | int -}}
{{- end -}}
