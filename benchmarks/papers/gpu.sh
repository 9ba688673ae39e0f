#!/usr/bin/env bash
# The papers' experiments on a machine with an NVIDIA GPU and no network.
#
#   SITE=$HOME/site benchmarks/papers/gpu.sh OUT [options of benchmarks.papers.run]
#
# SITE, PYTHON and VLLM_MLX_WHEELS are as for benchmarks/serve/gpu.sh. All is ended after LIMIT_S (390) seconds; nothing
# is begun after BUDGET_S (300). What was measured until then is in OUT: papers-<gpu>.json and .md, and log.txt.
#
# KEPT: a folder that stays on the machine, for the page. With it, run the command again, for the same or other parts: it
# goes on with those that are not on the page yet. Models are written anew each time; all together would fill a disk.
set -uo pipefail
out=${1:?where to write the results}; shift
mkdir -p "$out"
out=$(cd "$out" && pwd)
root=$(cd "$(dirname "$0")/../.." && pwd)
site=$(realpath "${SITE:-$HOME/site}")
python=$(type -P "${PYTHON:-python3}") || { echo "there is no ${PYTHON:-python3}" >&2; exit 1; }
case $python in /*) ;; *) python=$PWD/$python ;; esac
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PATH="$site/bin:$PATH"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# As users have it: without what else that Python has. Transformers imports torch where it is, which takes seconds.
base=$python
"$base" -m venv --without-pip "$scratch/python" && python=$scratch/python/bin/python
# Compiled modules, so that each is compiled once and the sources stay as they are.
export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$scratch/modules}
kept=${KEPT:-$scratch/kept}
mkdir -p "$kept"
kept=$(cd "$kept" && pwd)

timeout 20 nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
servers="satchel,mlx_lm.server,mlx_vlm.server" media="satchel,mlx_vlm.server"
vllm=()
if [ -n "${VLLM_MLX_WHEELS:-}" ]; then
	if [ -d "$kept/vllm-mlx" ] || timeout 30 "$base" -m pip install -q --no-index --no-deps --no-compile \
		--no-cache-dir --target "$kept/vllm-mlx" "$VLLM_MLX_WHEELS"/*.whl; then
		servers="$servers,vllm-mlx" media="$media,vllm-mlx (one at a time)"
		vllm=(--vllm-mlx-site "$kept/vllm-mlx")
	fi
fi

cd "$root" || exit 1
timeout --kill-after=10 "${LIMIT_S:-390}" "$python" -m benchmarks.papers.run --resume --budget-s "${BUDGET_S:-300}" \
	--models "$scratch/models" --out "$kept/page" --servers "$servers" --media-servers "$media" --start-timeout-s 150 \
	${vllm[@]+"${vllm[@]}"} "$@" 2>&1 | tee "$out/log.txt"
cp "$kept"/page/papers-* "$out"
