{{/* The worker's pod, for both modes. */}}

{{- define "pagelane.cacheEnv" -}}
- name: HF_HOME
  value: /cache/huggingface
- name: PAGELANE_CACHE
  value: /cache/pagelane
{{- if eq .Values.model.source "hub" }}
{{- with .Values.model.hub.endpoint }}
- name: HF_ENDPOINT
  value: {{ . }}
{{- end }}
{{- if .Values.model.hub.tokenSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .Values.model.hub.tokenSecret }}
      key: {{ .Values.model.hub.tokenKey }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "pagelane.modelMounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /cache
{{- if eq .Values.model.source "pvc" }}
- name: model
  mountPath: {{ .Values.model.pvc.mountPath }}
  {{- with .Values.model.pvc.subPath }}
  subPath: {{ . }}
  {{- end }}
  readOnly: true
{{- end }}
{{- end -}}

{{- define "pagelane.prefetch" -}}
- name: prefetch
  image: {{ include "pagelane.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [python3, -m, worker.resolve]
  args:
    - {{ .Values.worker.config.model | quote }}
    - {{ .Values.worker.config.load_format | default "auto" }}
    {{- with .Values.worker.config.revision }}
    {{- if ne . "null" }}
    - {{ . | quote }}
    {{- end }}
    {{- end }}
  env:
    - name: HOME
      value: /tmp
    {{- include "pagelane.cacheEnv" . | nindent 4 }}
    {{- with .Values.worker.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  resources:
    {{- toYaml .Values.model.prefetch.resources | nindent 4 }}
  securityContext:
    {{- include "pagelane.containerSecurity" . | nindent 4 }}
  volumeMounts:
    {{- include "pagelane.modelMounts" . | nindent 4 }}
    {{- with .Values.worker.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{- define "pagelane.workerEnv" -}}
{{- include "pagelane.identityEnv" . }}
{{- if eq .Values.mode "plain" }}
- name: DYN_NAMESPACE_WORKER_SUFFIX
  value: {{ include "pagelane.workerSuffix" . | quote }}
{{- end }}
- name: DYN_SYSTEM_PORT
  value: {{ int .Values.worker.systemPort | quote }}
- name: DYN_TCP_RPC_HOST
  value: $(POD_IP)
- name: DYN_TCP_RPC_PORT
  value: {{ int .Values.worker.rpcPort | quote }}
- name: DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS
  value: {{ int .Values.worker.gracePeriodSeconds | quote }}
- name: DYN_WORKER_GRACEFUL_SHUTDOWN_TIMEOUT
  value: {{ include "pagelane.shutdownTimeout" . | quote }}
{{ include "pagelane.cacheEnv" . }}
{{- end -}}

{{- define "pagelane.workerResources" -}}
{{- $resources := deepCopy .Values.worker.resources -}}
{{- if .Values.worker.gpu.count -}}
{{- $gpu := dict .Values.worker.gpu.resource (int .Values.worker.gpu.count) -}}
{{- $_ := set $resources "limits" (merge $gpu (default (dict) $resources.limits)) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

{{- define "pagelane.workerVolumes" -}}
- name: config
  configMap:
    name: {{ include "pagelane.fullname" . }}-worker
- name: tmp
  emptyDir:
    sizeLimit: {{ .Values.worker.tmpSize }}
{{- if eq .Values.mode "plain" }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .Values.worker.shmSize }}
{{- end }}
{{- if .Values.model.cache.claimName }}
- name: cache
  persistentVolumeClaim:
    claimName: {{ .Values.model.cache.claimName }}
{{- else if not .Values.model.cache.perWorker }}
- name: cache
  emptyDir:
    sizeLimit: {{ .Values.model.cache.size }}
{{- end }}
{{- if eq .Values.model.source "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .Values.model.pvc.claimName }}
    readOnly: true
{{- end }}
{{- with .Values.worker.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "pagelane.workerProbes" -}}
{{- with .Values.worker.probes }}
startupProbe:
  httpGet: {path: /live, port: system}
  periodSeconds: {{ int .startup.periodSeconds }}
  timeoutSeconds: 5
  failureThreshold: {{ divf .startup.timeoutSeconds .startup.periodSeconds | ceil | int }}
livenessProbe:
  httpGet: {path: /live, port: system}
  periodSeconds: {{ int .liveness.periodSeconds }}
  timeoutSeconds: {{ int .liveness.timeoutSeconds }}
  failureThreshold: {{ int .liveness.failureThreshold }}
readinessProbe:
  httpGet: {path: /health, port: system}
  periodSeconds: {{ int .readiness.periodSeconds }}
  timeoutSeconds: {{ int .readiness.timeoutSeconds }}
  failureThreshold: {{ int .readiness.failureThreshold }}
{{- end }}
{{- end -}}

{{- define "pagelane.workerPod" -}}
{{- $values := .Values.worker -}}
{{- if eq .Values.mode "plain" }}
serviceAccountName: {{ include "pagelane.fullname" . }}-worker
automountServiceAccountToken: true
{{- end }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "pagelane.workerTermination" . }}
securityContext:
  {{- include "pagelane.podSecurity" . | nindent 2 }}
{{- include "pagelane.placement" (dict "root" . "component" "worker") }}
{{- if and .Values.model.prefetch.enabled (ne .Values.model.source "pvc") }}
initContainers:
  {{- include "pagelane.prefetch" . | nindent 2 }}
{{- end }}
containers:
  - name: main
    image: {{ include "pagelane.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command: [pagelane, worker]
    # The page size stands here, too: a container that restarts while a change of the ConfigMap rolls out keeps the size
    # that its namespace is for.
    args: [--config, /etc/pagelane/worker.yaml, --kv-page-size, {{ include "pagelane.pageSize" . | quote }}{{ range $values.extraArgs }}, {{ . | quote }}{{ end }}]
    env:
      {{- include "pagelane.workerEnv" . | trim | nindent 6 }}
      {{- with $values.extraEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- with $values.extraEnvFrom }}
    envFrom:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    ports:
      - {name: system, containerPort: {{ int $values.systemPort }}, protocol: TCP}
      - {name: rpc, containerPort: {{ int $values.rpcPort }}, protocol: TCP}
    {{- include "pagelane.workerProbes" . | trim | nindent 4 }}
    {{- if $values.preStopSeconds }}
    lifecycle:
      preStop: {sleep: {seconds: {{ int $values.preStopSeconds }}}}
    {{- end }}
    resources:
      {{- include "pagelane.workerResources" . | nindent 6 }}
    securityContext:
      {{- include "pagelane.containerSecurity" . | nindent 6 }}
    volumeMounts:
      - {name: config, mountPath: /etc/pagelane, readOnly: true}
      {{- if eq .Values.mode "plain" }}
      - {name: shm, mountPath: /dev/shm}
      {{- end }}
      {{- include "pagelane.modelMounts" . | nindent 6 }}
      {{- with $values.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
volumes:
  {{- include "pagelane.workerVolumes" . | nindent 2 }}
{{- end -}}
