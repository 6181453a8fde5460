#!/usr/bin/env bash
# One rollout with nothing but curl: start it, ask the model once, give the reward.
#
#   TURNFOLD_CONTROL_KEY=… examples/curl/rollout.sh http://127.0.0.1:8080
#
# Only the first call needs the control key. The agent itself, in any language and on any machine,
# needs the base URL, its key, and one call for the reward.
set -euo pipefail

gateway="${1:-http://127.0.0.1:8080}"
json=(-H "content-type: application/json")

# curl's own retries carry the calls over a restart of the gateway.
call() { curl --silent --show-error --fail-with-body --retry 8 --retry-connrefused "$@"; }
field() { sed -E "s/.*\"$1\": ?\"([^\"]*)\".*/\1/"; }

# Whoever hands out the tasks starts the rollout. Rollouts of one group are compared with each other.
started=$(call "$gateway/v1/rollouts" "${json[@]}" \
  -H "Authorization: Bearer $TURNFOLD_CONTROL_KEY" \
  -d '{"group_id": "by-hand", "task_id": "door-3", "timeout_s": 600}')
base_url=$(field base_url <<<"$started")
api_key=$(field api_key <<<"$started")

# From here on it is the agent.
agent=(-H "Authorization: Bearer $api_key")

answer=$(call "$base_url/chat/completions" "${json[@]}" "${agent[@]}" \
  -d '{"model": "policy", "max_tokens": 48, "messages": [{"role": "user", "content": "open door 3"}]}')
echo "$answer"

reward=0.0
if [[ "$answer" == *5* ]]; then reward=1.0; fi
call "$base_url/rollouts/current/finish" "${json[@]}" "${agent[@]}" -d "{\"reward\": $reward}"
echo
