{{- define "kvhold.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvhold.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "kvhold.labels" -}}
{{ include "kvhold.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "kvhold.image" -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}

{{- define "kvhold.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvhold.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "kvhold.tokens" -}}
{{- default (printf "%s-tokens" (include "kvhold.fullname" .)) .Values.auth.existingSecret -}}
{{- end -}}

{{/* Not empty: something listens on the network. */}}
{{- define "kvhold.listens" -}}
{{- if or .Values.peers.enabled .Values.central.enabled (and .Values.control.enabled .Values.control.expose) -}}yes{{- end -}}
{{- end -}}

{{- define "kvhold.check" -}}
{{- if include "kvhold.listens" . -}}
{{- if not (or .Values.tls.existingSecret .Values.tls.insecure) -}}
{{- fail "peers, central and control.expose need TLS: set tls.existingSecret, or tls.insecure=true to send tokens and KV in clear text" -}}
{{- end -}}
{{- if and .Values.tls.existingSecret .Values.tls.insecure -}}
{{- fail "tls.existingSecret and tls.insecure exclude each other" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The options of a tier that logs in to other pods. */}}
{{- define "kvhold.login" -}}
{{- if .Values.tls.existingSecret -}}
ca_file=/etc/kvhold/tls/ca.crt
{{- else -}}
insecure=true
{{- end -}}
{{- end -}}

{{/* How a server of kvhold's logs clients in. */}}
{{- define "kvhold.server" -}}
{{- if .Values.tls.existingSecret -}}
tls_cert: /etc/kvhold/tls/tls.crt
tls_key: /etc/kvhold/tls/tls.key
{{- else -}}
insecure: true
{{- end -}}
{{- end -}}

{{- define "kvhold.nodeSettings" -}}
{{- $name := include "kvhold.fullname" . -}}
{{- $server := include "kvhold.server" . | fromYaml -}}
{{- $login := include "kvhold.login" . -}}
{{- $tiers := .Values.node.tiers -}}
{{- if .Values.peers.enabled -}}
{{- $tls := ternary "&tls=true" "" (not (empty .Values.tls.existingSecret)) -}}
{{- $tiers = append $tiers (printf "peers-dns://%s-peers.%s.svc:%d?token_file=/etc/kvhold/tokens/peers&%s%s" $name .Release.Namespace (int .Values.peers.port) $login $tls) -}}
{{- end -}}
{{- if .Values.central.enabled -}}
{{- $scheme := ternary "kvholds" "kvhold" (not (empty .Values.tls.existingSecret)) -}}
{{- $tiers = append $tiers (printf "%s://%s-central.%s.svc:%d?token_file=/etc/kvhold/tokens/central&%s" $scheme $name .Release.Namespace (int .Values.central.port) $login) -}}
{{- end -}}
{{- $settings := dict
  "ram_bytes" .Values.node.ramBytes
  "huge_pages" (ternary "always" "auto" (not (empty .Values.node.hugepages)))
  "tiers" $tiers
  "clears_file" "/var/lib/kvhold/state/clears"
  "node" (dict "socket" "/run/kvhold/node.sock" "autostart" false)
-}}
{{- if .Values.peers.enabled -}}
{{- $_ := set $settings "peers" (merge (dict "token_file" "/etc/kvhold/tokens/peers") $server) -}}
{{- end -}}
{{- if .Values.control.enabled -}}
{{- $control := dict "socket" "/run/kvhold/control.sock" "history_file" "/var/lib/kvhold/state/history" "listen" (printf "127.0.0.1:%d" (int .Values.control.port)) -}}
{{- if .Values.control.expose -}}
{{- $control = merge (dict
  "listen" (printf "0.0.0.0:%d" (int .Values.control.port))
  "read_token_file" "/etc/kvhold/tokens/read"
  "operate_token_file" "/etc/kvhold/tokens/operate"
  "administer_token_file" "/etc/kvhold/tokens/administer"
) $control $server -}}
{{- end -}}
{{- $_ := set $settings "control" $control -}}
{{- end -}}
{{- toYaml (mergeOverwrite $settings (deepCopy .Values.node.settings)) -}}
{{- end -}}

{{- define "kvhold.centralSettings" -}}
{{- $server := include "kvhold.server" . | fromYaml -}}
{{- $settings := dict
  "ram_bytes" .Values.central.ramBytes
  "listen" (merge (dict "address" (printf "0.0.0.0:%d" (int .Values.central.port)) "token_file" "/etc/kvhold/tokens/central") $server)
-}}
{{- if .Values.central.storage.size -}}
{{- $_ := set $settings "tiers" (list "disk:///var/lib/kvhold/disk") -}}
{{- $_ := set $settings "clears_file" "/var/lib/kvhold/state/clears" -}}
{{- end -}}
{{- toYaml (mergeOverwrite $settings (deepCopy .Values.central.settings)) -}}
{{- end -}}

{{- define "kvhold.securityContext" -}}
runAsUser: {{ int64 .Values.user }}
runAsGroup: {{ int64 .Values.user }}
runAsNonRoot: {{ ne (int .Values.user) 0 }}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* exec probes: a dict with the settings `timing` and the words `command` */}}
{{- define "kvhold.probe" -}}
exec:
  command: {{ toJson .command }}
{{ toYaml .timing }}
{{- end -}}

{{/* A volume with some of the tokens: a dict with `root`, `name` and `keys` */}}
{{- define "kvhold.tokenVolume" -}}
- name: {{ .name }}
  secret:
    secretName: {{ include "kvhold.tokens" .root }}
    defaultMode: 0440
    items:
      {{- range .keys }}
      - key: {{ . }}
        path: {{ . }}
      {{- end }}
{{- end -}}
