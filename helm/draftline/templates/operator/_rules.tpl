{{/* In each watched namespace: the resources and their children. */}}
{{- define "draftline.workloadRules" -}}
- apiGroups: [draftline.dev]
  resources: [speculativedeployments]
  verbs: [get, list, watch, patch]
- apiGroups: [draftline.dev]
  resources: [speculativedeployments/status]
  verbs: [patch]
# Owner references that block deletion, where OwnerReferencesPermissionEnforcement is on.
- apiGroups: [draftline.dev]
  resources: [speculativedeployments/finalizers]
  verbs: [update]
# Children that stay as long as their resource, which Kubernetes then collects.
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, list, watch, create, patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
# Children that come and go.
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list, watch, create, patch, delete]
# Of other projects, where they are installed.
- apiGroups: [monitoring.coreos.com]
  resources: [servicemonitors]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [keda.sh]
  resources: [scaledobjects]
  verbs: [get, list, watch, create, patch, delete]
# What pods say of their load, and the deletion cost that is written from it.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]
# Only those that a resource names, for the hash that rolls pods out when they change.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get]
{{- end -}}

{{/* Cluster-wide, and only there. */}}
{{- define "draftline.clusterRules" -}}
# The memory of accelerators, from the labels of nodes.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list]
{{- if include "draftline.hasMetricsApi" . }}
- apiGroups: [apiregistration.k8s.io]
  resources: [apiservices]
  resourceNames: [v1beta1.custom.metrics.k8s.io, v1beta2.custom.metrics.k8s.io]
  verbs: [get, patch{{ if .Values.autoscaling.metricsApi.preDeleteHook }}, delete{{ end }}]
- apiGroups: [authorization.k8s.io]
  resources: [subjectaccessreviews]
  verbs: [create]
{{- end }}
{{- end -}}

{{/* In the release's namespace: what operators share. */}}
{{- define "draftline.ownRules" -}}
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  resourceNames: [{{ include "draftline.fullname" . }}]
  verbs: [get, update]
{{- if include "draftline.hasMetricsApi" . }}
- apiGroups: [""]
  resources: [secrets]
  resourceNames: [{{ include "draftline.metricsApiName" . }}]
  verbs: [get, patch]
{{- end }}
{{- end -}}
