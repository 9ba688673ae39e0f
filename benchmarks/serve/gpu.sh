#!/usr/bin/env bash
# The serving benchmark on a machine with an NVIDIA GPU and no network, in about six minutes.
#
#   SITE=$HOME/site benchmarks/serve/gpu.sh OUT [options of benchmarks.serve.run]
#
# SITE: a folder with Satchel's dependencies, mlx[cuda13] among them (pip install --target), and py-spy.
# PYTHON: the interpreter they are for; python3 where it is not set.
# VLLM_MLX_WHEELS: a folder with the wheels of vllm-mlx 0.6.0 and mlx-lm 0.31.3, which go into a folder of their own,
# because Satchel has a newer mlx-lm; without it vllm-mlx is left out. What else it needs is in SITE. To get them:
#   pip download --no-deps -d wheels vllm-mlx==0.6.0 mlx-lm==0.31.3
#
# HOW: "--together --profile" where it is not set; empty starts one server at a time and looks into none.
# On a machine with several cards, one server after the other, in about nine minutes:
#   HOW= MODELS=qwen3-8b-4bit STREAMS=1,4,16,32 LOADS=1500 LIMIT_S=560 BUDGET_S=460 benchmarks/serve/gpu.sh OUT \
#     --only "satchel,satchel (a replica a card),satchel (divided),satchel (divided for room)" --cards 2 \
#     --turns 16000 --long-prompt-tokens 0 --start-timeout-s 200 --answer-timeout-s 120
#
# OUT gets serve-<gpu>.json and .md, written anew after every measurement, and log.txt.
set -uo pipefail
out=${1:?where to write the results}; shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
site=$(realpath "${SITE:-$HOME/site}")
python=$(type -P "${PYTHON:-python3}") || { echo "there is no ${PYTHON:-python3}" >&2; exit 1; }
case $python in /*) ;; *) python=$PWD/$python ;; esac
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PATH="$site/bin:$PATH"
targets="satchel,satchel (weights stored),satchel engine,BatchGenerator,mlx_lm.server,mlx_vlm.server"
vllm=()
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# As users have it: without what else that Python has. Transformers imports torch where it is, which takes seconds.
base=$python
"$base" -m venv --without-pip "$scratch/python" && python=$scratch/python/bin/python
# Compiled modules, so that each is compiled once and the sources stay as they are.
export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$scratch/modules}

# 20 s: the GPU computes at all, and this is what it is.
timeout 20 nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
timeout 60 "$python" -c 'import mlx.core as mx; x = mx.ones((64, 64)); mx.eval(x @ x); print(mx.default_device())' || exit 1

# 30 s: vllm-mlx.
if [ -n "${VLLM_MLX_WHEELS:-}" ]; then
	if timeout 30 "$base" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir \
		--target "$scratch/vllm-mlx" "$VLLM_MLX_WHEELS"/*.whl; then
		targets="$targets,vllm-mlx"
		vllm=(--vllm-mlx-site "$scratch/vllm-mlx")
	fi
fi

# 330 s: everything. No measurement is begun after 230 s, which leaves time for the profile; a run that hangs is ended,
# with its servers, and what was measured until then is in OUT.
cd "$root" || exit 1
timeout --kill-after=30 "${LIMIT_S:-330}" "$python" -m benchmarks.serve.run --models "${MODELS:-qwen3-0.6b-4bit}" --streams "${STREAMS:-1,16}" \
	--tokens 128 --prompt-tokens "${LOADS:-128,1500,8000}" --rounds "${ROUNDS:-1}" ${HOW---together --profile} --budget-s "${BUDGET_S:-230}" --only "$targets" \
	--start-timeout-s 100 --answer-timeout-s 40 \
	--out "$out" ${vllm[@]+"${vllm[@]}"} "$@" 2>&1 | tee "$out/log.txt"
