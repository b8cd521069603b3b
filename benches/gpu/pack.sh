#!/usr/bin/env bash
# Packs what the GPU tests and benchmarks run into .gpu/: a machine with GPUs then needs neither Rust nor a network.
#
#     benches/gpu/pack.sh            the wheel, the GPU tests, the examples that measure
#     benches/gpu/pack.sh --nixl     and the part of NIXL that bench-gpu compares with
#     benches/gpu/pack.sh --deepep   and DeepEP (V1)
#     benches/gpu/pack.sh --deepep-v2   and DeepEP V2, with the NCCL that it needs
#     benches/gpu/pack.sh --nccl-ep     and NCCL EP, with its NCCL
#     benches/gpu/pack.sh --engines  and what the tests import of vLLM and SGLang
#
# Carry the checkout and .gpu there and run `make test-gpu GPU_PACK=.gpu` and `make bench-gpu GPU_PACK=.gpu`.
set -euo pipefail
cd "$(dirname "$0")/../.."

pack=.gpu
bin=${BIN:-.venv/bin}
# As `make test`: checks stay in. What is measured, and the wheel, are built as they are released.
export CARGO_PROFILE_TEST_OPT_LEVEL=1
export MATURIN_NO_MISSING_BUILD_BACKEND_WARNING=1
peers=()
for option in "$@"; do
    case $option in
        --nixl | --deepep | --deepep-v2 | --nccl-ep | --engines) peers+=("${option#--}") ;;
        *) echo "pack.sh: unknown option $option; there are --nixl, --deepep, --deepep-v2, --nccl-ep and --engines" >&2; exit 2 ;;
    esac
done

say() { printf -- '-- pack: %s\n' "$1" >&2; }

# Copies the executables that cargo's messages name, as PACKAGE.TARGET, without symbols.
keep() {
    "$bin/python" -c '
import json, sys
from pathlib import Path

for line in sys.stdin:
    message = json.loads(line)
    if message.get("executable"):
        manifest = Path(message["manifest_path"]).read_text()
        package = manifest.split("name = \"", 1)[1].split("\"", 1)[0]
        print(message["executable"], package + "." + message["target"]["name"])
' | while read -r program name; do
        strip -o "$1/$name" "$program"
    done
}

rm -rf "$pack/wheel" "$pack/tests" "$pack/examples" "$pack/c" "$pack/manifest.json"
mkdir -p "$pack/wheel" "$pack/tests" "$pack/examples" "$pack/c"

say "wheel"
"$bin/python" packaging/nccl_plugin.py
"$bin/maturin" build --quiet --release --locked --strip --out "$pack/wheel"
say "tests"
cargo test --quiet --locked --workspace --exclude crossrail-python --test 'gpu*' --no-run --message-format json |
    keep "$pack/tests"
say "C library"
"$bin/python" packaging/c_library.py --prefix "$pack/c"
say "examples"
cargo build --quiet --locked --release --package crossrail-kernels --package crossrail-emulator --package 'crossrail-cuda*' --examples \
    --message-format json | keep "$pack/examples"
for peer in ${peers[@]+"${peers[@]}"}; do
    say "$peer"
    "$bin/python" benches/gpu/pack.py "$peer" "$pack/$peer.tar.xz"
done

commit=$(git rev-parse HEAD)
git diff --quiet HEAD -- || commit+=+
printf '{"commit": "%s", "time": "%s"}\n' "$commit" "$(date -u +%Y-%m-%dT%H:%M:%S+00:00)" >"$pack/manifest.json"
du -sh --apparent-size "$pack" >&2
