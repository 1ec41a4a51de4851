{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}

{{- /* The labels by which objects are selected: (list $ "worker"). */ -}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/managed-by: {{ (index . 0).Release.Service }}
helm.sh/chart: {{ (index . 0).Chart.Name }}-{{ (index . 0).Chart.Version }}
{{- end -}}

{{- define "penstock.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- /* The part of a pod's spec that all pods share. */ -}}
{{- define "penstock.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "penstock.container" -}}
image: {{ include "penstock.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities:
    drop: [ALL]
{{- end -}}

{{- /*
penstock takes keys from files of its own user that nobody else can read, in a folder like that. A Secret is mounted as
symbolic links in a folder of root's, so the keys are copied into memory, by a command: (list $ command). The mounts follow.
*/ -}}
{{- define "penstock.copyKeys" -}}
- name: keys
  {{- include "penstock.container" (index . 0) | nindent 2 }}
  command:
    - sh
    - -c
    - {{ index . 1 | quote }}
  resources:
    requests: {cpu: 50m, memory: 32Mi}
    limits: {memory: 32Mi}
{{- end -}}

{{- /* The volumes of a pod's keys, with these secret ones: (list $ "worker.secret"). */ -}}
{{- define "penstock.keyVolumes" -}}
- name: keys
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
- name: secret
  secret:
    secretName: {{ (index . 0).Values.keysSecret }}
    defaultMode: 0440
    items:
      {{- range list "controller.public" "operator.public" "trainer.public" "worker.public" }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
      {{- range rest . }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end -}}

{{- define "penstock.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
