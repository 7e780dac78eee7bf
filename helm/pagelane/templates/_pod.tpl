{{/* What the pods of both modes and both components have in common. */}}

{{- define "pagelane.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.securityContext.runAsUser }}
runAsGroup: {{ int64 .Values.securityContext.runAsGroup }}
fsGroup: {{ int64 .Values.securityContext.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "pagelane.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Takes root and component. */}}
{{- define "pagelane.podMetadata" -}}
{{- $part := index .root.Values .component -}}
labels:
  {{- include "pagelane.selector" . | nindent 2 }}
  {{- with .root.Values.commonLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with $part.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $checksum := ternary (dict "checksum/config" (include "pagelane.workerYaml" .root | sha256sum)) (dict) (eq .component "worker") }}
{{- with merge (dict) $part.podAnnotations $checksum .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Where the pods may run, and whose images. Takes root and component. */}}
{{- define "pagelane.placement" -}}
{{- $part := index .root.Values .component -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $part.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $part.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- if $part.topologySpread }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ $part.topologyKey }}
    whenUnsatisfiable: {{ $part.topologySpread }}
    labelSelector:
      matchLabels:
        {{- include "pagelane.selector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{/* Who this pod is and where it is reached. The operator sets the first three, and discovery, itself. */}}
{{- define "pagelane.identityEnv" -}}
{{- if eq .Values.mode "plain" }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
- name: DYN_DISCOVERY_BACKEND
  value: kubernetes
- name: DYN_NAMESPACE
  value: {{ include "pagelane.dynamoNamespace" . }}
{{- end }}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: DYN_REQUEST_PLANE
  value: {{ .Values.worker.config.request_plane | default "tcp" }}
- name: DYN_EVENT_PLANE
  value: {{ .Values.worker.config.event_plane | default "zmq" }}
- name: DYN_EVENT_PLANE_HOST
  value: $(POD_IP)
- name: DYN_LOGGING_JSONL
  value: "true"
- name: HOME
  value: /tmp
{{- end -}}
