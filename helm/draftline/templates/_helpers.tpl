{{- define "draftline.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 40 characters, so that every derived name keeps within 63. */}}
{{- define "draftline.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "draftline.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "draftline.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Cluster-wide objects of releases in different namespaces must not meet. */}}
{{- define "draftline.clusterName" -}}
{{- printf "%s-%s" .Release.Namespace (include "draftline.fullname" .) | trunc 253 -}}
{{- end -}}

{{- define "draftline.selectorLabels" -}}
app.kubernetes.io/name: {{ include "draftline.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{/* Of everything that is not the operator itself: its selector must not match them. */}}
{{- define "draftline.releaseLabels" -}}
app.kubernetes.io/name: {{ include "draftline.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: draftline
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "draftline.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "draftline.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "draftline.labels" -}}
{{ include "draftline.releaseLabels" . }}
app.kubernetes.io/component: operator
{{- end -}}

{{/* The reference of an image: (dict "image" .Values.image "chart" .Chart). */}}
{{- define "draftline.image" -}}
{{- with .image.registry }}{{ . }}/{{ end -}}
{{- .image.repository -}}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ default $.chart.AppVersion .image.tag }}{{ end -}}
{{- end -}}

{{- define "draftline.metricsApiName" -}}
{{- printf "%s-metrics-api" (include "draftline.fullname" .) -}}
{{- end -}}

{{/* The namespaces to watch, as a YAML list; empty: all. */}}
{{- define "draftline.watchNamespaces" -}}
{{- if eq .Values.scope "namespaced" -}}
{{- default (list .Release.Namespace) .Values.watchNamespaces | uniq | sortAlpha | toYaml -}}
{{- else -}}
{{- if .Values.watchNamespaces }}{{ fail "watchNamespaces needs scope: namespaced" }}{{ end -}}
[]
{{- end -}}
{{- end -}}

{{/* Who else has custom.metrics.k8s.io, for people; empty where it is free or ours. Only a real install sees it. */}}
{{- define "draftline.groupOwner" -}}
{{- $owner := "" -}}
{{- range $version := list "v1beta2" "v1beta1" -}}
{{- $found := lookup "apiregistration.k8s.io/v1" "APIService" "" (printf "%s.custom.metrics.k8s.io" $version) -}}
{{- if and $found (not $owner) -}}
{{- $service := default dict $found.spec.service -}}
{{- if not (and (eq (default "" $service.name) (include "draftline.metricsApiName" $)) (eq (default "" $service.namespace) $.Release.Namespace)) -}}
{{- $owner = printf "Service %s/%s" (default "-" $service.namespace) (default "-" $service.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $owner -}}
{{- end -}}

{{/* Who serves the autoscaler's metrics: builtin, keda, prometheus-adapter or none. */}}
{{- define "draftline.provider" -}}
{{- $asked := .Values.autoscaling.provider -}}
{{- $isCluster := eq .Values.scope "cluster" -}}
{{- $owner := "" -}}
{{- if $isCluster }}{{ $owner = include "draftline.groupOwner" . }}{{ end -}}
{{- if and (eq $asked "builtin") (not $isCluster) -}}
{{- fail "autoscaling.provider: builtin needs scope: cluster, for an API group belongs to the whole cluster" -}}
{{- end -}}
{{- if and (eq $asked "builtin") $owner -}}
{{- fail (printf "autoscaling.provider: builtin is not possible, custom.metrics.k8s.io belongs to %s; set keda, prometheus-adapter or none" $owner) -}}
{{- end -}}
{{- if ne $asked "auto" -}}
{{- $asked -}}
{{- else if and $isCluster (not $owner) -}}
builtin
{{- else if .Capabilities.APIVersions.Has "keda.sh/v1alpha1" -}}
keda
{{- else if or $owner (.Capabilities.APIVersions.Has "custom.metrics.k8s.io/v1beta2") (.Capabilities.APIVersions.Has "custom.metrics.k8s.io/v1beta1") -}}
prometheus-adapter
{{- else -}}
none
{{- end -}}
{{- end -}}

{{/* "true" where the operator serves the metrics API: an API group without a server disturbs the whole cluster. */}}
{{- define "draftline.hasMetricsApi" -}}
{{- if and (eq (include "draftline.provider" .) "builtin") (gt (int .Values.replicas) 0) -}}true{{- end -}}
{{- end -}}

{{/* What the operator is told, for its Deployment and for the hook. */}}
{{- define "draftline.env" -}}
- name: DRAFTLINE_OPERATOR_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
- name: DRAFTLINE_OPERATOR_POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: DRAFTLINE_OPERATOR_WATCH_NAMESPACES
  value: {{ include "draftline.watchNamespaces" . | fromYamlArray | join "," | quote }}
- name: DRAFTLINE_OPERATOR_LEASE_NAME
  value: {{ include "draftline.fullname" . }}
- name: DRAFTLINE_OPERATOR_HEALTH_PORT
  value: {{ .Values.healthPort | quote }}
- name: DRAFTLINE_OPERATOR_LOG_LEVEL
  value: {{ .Values.log.level }}
- name: DRAFTLINE_OPERATOR_LOG_FORMAT
  value: {{ .Values.log.format }}
- name: DRAFTLINE_OPERATOR_DEFAULT_IMAGE
  value: {{ include "draftline.image" (dict "image" .Values.serving.image "chart" .Chart) }}
- name: DRAFTLINE_OPERATOR_IMAGE_PULL_POLICY
  value: {{ .Values.serving.image.pullPolicy }}
- name: DRAFTLINE_OPERATOR_ALLOW_HOST_PATH
  value: {{ .Values.serving.allowHostPath | quote }}
- name: DRAFTLINE_OPERATOR_NETWORK_POLICY
  value: {{ .Values.serving.networkPolicy | quote }}
- name: DRAFTLINE_OPERATOR_SERVICE_MONITOR
  value: {{ .Values.serving.serviceMonitor | quote }}
{{- with .Values.serving.serviceMonitorLabels }}
{{- $labels := list }}
{{- range $name, $value := . }}
{{- $labels = append $labels (printf "%s=%s" $name $value) }}
{{- end }}
- name: DRAFTLINE_OPERATOR_SERVICE_MONITOR_LABELS
  value: {{ join "," $labels | quote }}
{{- end }}
- name: DRAFTLINE_OPERATOR_AUTOSCALING_PROVIDER
  value: {{ include "draftline.provider" . }}
{{- if eq (include "draftline.provider" .) "keda" }}
- name: DRAFTLINE_OPERATOR_METRICS_URL
  value: http://{{ include "draftline.fullname" . }}.{{ .Release.Namespace }}.svc:{{ .Values.healthPort }}
{{- end }}
{{- if include "draftline.hasMetricsApi" . }}
- name: DRAFTLINE_OPERATOR_METRICS_API_SERVICE
  value: {{ include "draftline.metricsApiName" . }}
- name: DRAFTLINE_OPERATOR_METRICS_API_SECRET
  value: {{ include "draftline.metricsApiName" . }}
- name: DRAFTLINE_OPERATOR_METRICS_API_PORT
  value: {{ .Values.autoscaling.metricsApi.port | quote }}
{{- end }}
{{- end -}}
