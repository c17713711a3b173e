{{/* What the launcher's and the workers' pods have in common. */}}
{{- define "hvd.pod" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: shared-memory
    emptyDir:
      medium: Memory
      sizeLimit: {{ .Values.sharedMemory }}
  - name: data
    {{- if .Values.storage.claim }}
    persistentVolumeClaim:
      claimName: {{ .Values.storage.claim }}
    {{- else }}
    emptyDir: {}
    {{- end }}
  {{- if .Values.script }}
  - name: script
    configMap:
      name: {{ .Release.Name }}-script
  {{- end }}
{{- end }}

{{- define "hvd.container" -}}
image: {{ .Values.image }}
imagePullPolicy: {{ .Values.imagePullPolicy }}
workingDir: {{ .Values.storage.path }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
volumeMounts:
  - name: shared-memory
    mountPath: /dev/shm
  - name: data
    mountPath: {{ .Values.storage.path }}
  {{- if .Values.script }}
  - name: script
    mountPath: /opt/job
  {{- end }}
{{- if or .Values.env .Values.secretEnv }}
env:
  {{- range $name, $value := .Values.env }}
  - name: {{ $name }}
    value: {{ $value | quote }}
  {{- end }}
  {{- range $name, $from := .Values.secretEnv }}
  - name: {{ $name }}
    valueFrom:
      secretKeyRef:
        {{- toYaml $from | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}
