#!/usr/bin/env bash
# What SGLang imports but does not call on a CPU: torchvision and its own GPU kernels.
set -euo pipefail

environment=$1
here=$(cd "$(dirname "$0")" && pwd)
packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')

# torchvision without its compiled part: the part in Python is all that is imported, except for one
# module that describes the compiled operators.
"$environment/bin/uv" pip install --quiet --python "$environment/bin/python" --no-deps \
  --compile-bytecode torchvision==0.28.0
echo '"""Left empty: there are no compiled operators to describe."""' \
  >"$packages/torchvision/_meta_registrations.py"

cp "$here/sgl_kernel.py" "$packages/sgl_kernel.py"
SGLANG_USE_CPU_ENGINE=1 "$environment/bin/python" -c 'import sglang.srt.entrypoints.http_server'
