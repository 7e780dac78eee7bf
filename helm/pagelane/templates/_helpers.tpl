{{/* Names, labels and images. */}}

{{- define "pagelane.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains .Chart.Name .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end -}}
{{- end -}}

{{- define "pagelane.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels of an object. Takes root and, where it belongs to one, component. */}}
{{- define "pagelane.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: pagelane
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Name, namespace, labels and annotations of an object. Takes root, name, component and annotations. */}}
{{- define "pagelane.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "pagelane.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default (dict) .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "pagelane.image" -}}
{{- $device := ternary "cpu" "cuda" (eq (.Values.worker.config.device | default "auto") "cpu") -}}
{{- $tag := .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion $device) -}}
{{ .Values.image.repository }}:{{ $tag }}{{ with .Values.image.digest }}@{{ . }}{{ end }}
{{- end -}}

{{/* Dynamo namespace without the page size. No other release's name begins with it: Kubernetes' names have no "_". */}}
{{- define "pagelane.dynamoNamespace" -}}
{{ .Values.dynamoNamespace | default (include "pagelane.fullname" .) }}_page
{{- end -}}

{{- define "pagelane.servedName" -}}
{{- $config := .Values.worker.config -}}
{{- if and $config.served_model_name (ne $config.served_model_name "null") -}}
{{ $config.served_model_name }}
{{- else if hasPrefix "/" $config.model -}}
{{ base $config.model }}
{{- else -}}
{{ first (splitList "@" $config.model) }}
{{- end -}}
{{- end -}}

{{- define "pagelane.replicaSync" -}}
{{- $sync := .Values.frontend.replicaSync -}}
{{- if kindIs "invalid" $sync -}}{{- $sync = gt (int .Values.frontend.replicas) 1 -}}{{- end -}}
{{- if $sync -}}true{{- end -}}
{{- end -}}
