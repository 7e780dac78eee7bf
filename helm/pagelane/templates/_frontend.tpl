{{/* The frontend's pod, for both modes. */}}

{{- define "pagelane.frontendEnv" -}}
{{- include "pagelane.identityEnv" . }}
{{- if eq .Values.mode "plain" }}
# The namespaces of every page size of this release.
- name: DYN_NAMESPACE_PREFIX
  value: {{ include "pagelane.dynamoNamespace" . }}-
{{- end }}
- name: DYN_TCP_RESPONSE_STREAM_HOST
  value: $(POD_IP)
- name: DYN_TCP_RESPONSE_STREAM_PORT
  value: {{ int .Values.frontend.responseStreamPort | quote }}
- name: DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS
  value: {{ int .Values.frontend.errorPeekMs | quote }}
{{- end -}}

{{- define "pagelane.frontendPod" -}}
{{- $values := .Values.frontend -}}
{{- if eq .Values.mode "plain" }}
serviceAccountName: {{ include "pagelane.fullname" . }}-frontend
automountServiceAccountToken: true
{{- end }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "pagelane.frontendTermination" . }}
securityContext:
  {{- include "pagelane.podSecurity" . | nindent 2 }}
{{- include "pagelane.placement" (dict "root" . "component" "frontend") }}
containers:
  - name: main
    image: {{ include "pagelane.image" . }}
    imagePullPolicy: {{ .Values.image.pullPolicy }}
    command: [python3, -m, dynamo.frontend]
    args:
      - --http-port={{ int $values.port }}
      - --router-mode={{ $values.routerMode }}
      - --migration-limit={{ int $values.migrationLimit }}
      {{- if include "pagelane.replicaSync" . }}
      - --router-replica-sync
      {{- end }}
      {{- range $values.extraArgs }}
      - {{ . | quote }}
      {{- end }}
    env:
      {{- include "pagelane.frontendEnv" . | trim | nindent 6 }}
      {{- with $values.extraEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- with $values.extraEnvFrom }}
    envFrom:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    ports:
      - {name: http, containerPort: {{ int $values.port }}, protocol: TCP}
      - {name: responses, containerPort: {{ int $values.responseStreamPort }}, protocol: TCP}
    startupProbe:
      httpGet: {path: /live, port: http}
      periodSeconds: 2
      timeoutSeconds: 2
      failureThreshold: 60
    livenessProbe:
      httpGet: {path: /live, port: http}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    # /health, which says that the process serves; a model it may not have yet.
    readinessProbe:
      httpGet: {path: /health, port: http}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: 3
    {{- if $values.preStopSeconds }}
    lifecycle:
      preStop: {sleep: {seconds: {{ int $values.preStopSeconds }}}}
    {{- end }}
    resources:
      {{- toYaml $values.resources | nindent 6 }}
    securityContext:
      {{- include "pagelane.containerSecurity" . | nindent 6 }}
    volumeMounts:
      # $HOME/.cache/dynamo: copies of the workers' model cards, without which the model is never listed.
      - {name: tmp, mountPath: /tmp}
      {{- with $values.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
volumes:
  - name: tmp
    emptyDir:
      sizeLimit: 2Gi
  {{- with $values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
