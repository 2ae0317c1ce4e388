#!/bin/bash
# Puts what a GPU machine without network needs into a folder (default .carry/, ignored by git): run it where there is network.
#   bench/gpu/prepare.sh [--site SITE.tar.xz] [--cache KERNELS.tgz] [FOLDER]
# Without --site it builds one: SGLang 0.5.14 and what a machine with Python 3.12 and torch 2.11 (CUDA 13) lacks (615 MB are
# downloaded, 42 MB are kept, about six minutes). --cache is optional: kernels that a first boot compiled (session.sh keeps them).
# Needs a python3 with pip here; the machine needs Python 3.12, torch, triton, transformers' other needs, pyarrow, pandas, scipy,
# matplotlib, nvcc, ninja and g++.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd); root=$(cd "$here/../.." && pwd)
site="" cache=""
while [ $# -gt 0 ]; do case $1 in
  --site) site=$2; shift 2;; --cache) cache=$2; shift 2;; *) break;; esac; done
out=${1:-$root/.carry}; py=${PYTHON:-python3}
mkdir -p "$out/wheels"

platforms=(); for n in 39 35 34 31 28 27 26 24 17 12 5; do platforms+=(--platform "manylinux_2_${n}_x86_64"); done
platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64 --platform linux_x86_64)
fetch() { # FOLDER REQUIREMENT...: one by one, for Python 3.12
  local to=$1; shift
  for what in "$@"; do
    "$py" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
      --implementation cp "${platforms[@]}" -d "$to" "$what"
  done
}

# What campaign itself needs beyond the packages that such an image holds; versions as pinned in constraints.txt.
for name in pydantic pydantic-core annotated-types typing-inspection httptools orjson ruamel-yaml tenacity click; do
  pinned=$(grep -i "^$name==" "$root/constraints.txt")
  ls "$out/wheels" | tr - _ | grep -qi "^$(echo "$name" | tr - _)_${pinned##*==}_" || fetch "$out/wheels" "$pinned"
done

if [ -n "$site" ]; then cp "$site" "$out/site.tar.xz"
elif [ ! -f "$out/site.tar.xz" ]; then
  work=$(mktemp -d); trap 'rm -rf "$work"' EXIT; mkdir "$work/site"
  fetch "$work/whl" sglang==0.5.14 sglang-kernel==0.4.4 flashinfer-python==0.6.12 apache-tvm-ffi==0.1.9 transformers==5.8.1 \
    tokenizers==0.22.2 fastapi==0.121.0 starlette==0.49.1 uvicorn==0.38.0 pydantic==2.14.4 pydantic-core==2.50.5 \
    typing-inspection annotated-types python-multipart watchfiles pyzmq msgspec orjson pybase64 setproctitle \
    partial_json_parser torch_memory_saver torchao==0.17.0 compressed-tensors==0.20.1 openai==2.6.1 openai-harmony distro \
    jiter sniffio gguf nvidia-ml-py sgl-deep-gemm==0.1.3 jsonschema jsonschema-specifications referencing rpds-py dill \
    soundfile cffi pycparser loguru
  for wheel in "$work"/whl/*.whl; do case $wheel in
    # FlashAttention 3 is 578 MB: left out, so arms need attention_backend: triton.
    *sglang_kernel*) unzip -q -o "$wheel" -x 'sgl_kernel/flash_ops*' 'sgl_kernel/sm100/*' -d "$work/site";;
    *) unzip -q -o "$wheel" -d "$work/site";; esac; done
  rm -rf "$work"/site/sglang/{multimodal_gen,test,benchmark} "$work"/site/sglang/jit_kernel/{benchmark,tests}
  rm -f "$work"/site/sglang/srt/grpc/*.so "$work"/site/torch_memory_saver_hook*cu12*
  # sglang imports IPython.display at the top; nothing of it is used.
  mkdir -p "$work/site/IPython"
  printf 'def _n(*a, **k):\n    return None\nget_ipython = _n\n__version__ = "9.0.0"\n' > "$work/site/IPython/__init__.py"
  printf 'def _n(*a, **k):\n    return None\nHTML = display = Image = _n\n' > "$work/site/IPython/display.py"
  XZ_OPT="-6 -T0" tar cJf "$out/site.tar.xz" -C "$work/site" .
fi
[ -z "$cache" ] || cp "$cache" "$out/kernels.tgz"
du -ch "$out"/* | sed 's/^/  /'
