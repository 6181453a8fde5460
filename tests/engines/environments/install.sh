#!/usr/bin/env bash
# Installs a real inference server, for CPUs, into an environment of its own.
#
#     tests/engines/environments/install.sh vllm .env-vllm
#     tests/engines/environments/install.sh sglang .env-sglang
#
# Both servers are published for GPUs. What a CPU neither needs nor can load is left out by
# overrides.txt; pip has no overrides, hence uv. uv takes its sources from pip's settings, so that
# a mirror or a folder of wheels that pip is told to use is used here too.
# Safe to run again: a half-made environment is completed.
set -euo pipefail

engine=$1
environment=$2
here=$(cd "$(dirname "$0")" && pwd)
wanted="$here/$engine"
python="$environment/bin/python"
unset PYTHONDONTWRITEBYTECODE # the server starts several processes that import everything

pip_setting() { # NAME: what pip would use, from its environment or its files, or nothing
  local variable="PIP_${1^^}"
  variable=${variable//-/_}
  echo "${!variable:-$("$python" -m pip config get "global.$1" 2>/dev/null | xargs || true)}"
}

[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$environment"
"$python" -m pip install --quiet uv

use() { # UV_NAME pip-name: what is set for uv already is kept
  local found
  found=$(pip_setting "$2")
  [ -n "${!1:-}" ] || [ -z "$found" ] || export "$1=$found"
}
use UV_DEFAULT_INDEX index-url
use UV_INDEX extra-index-url
use UV_FIND_LINKS find-links
use SSL_CERT_FILE cert

"$environment/bin/uv" pip install --quiet --python "$python" --compile-bytecode \
  --index-strategy unsafe-best-match \
  --override "$wanted/overrides.txt" --requirement "$wanted/requirements.txt"

[ ! -f "$wanted/finish.sh" ] || "$wanted/finish.sh" "$environment"
