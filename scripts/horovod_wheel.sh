#!/usr/bin/env bash
# Builds Horovod for the torch of the given Python once, keeps the wheel in the user's cache, and prints its path.
#
#   scripts/horovod_wheel.sh .venv/bin/python
#
# Without more the wheel works on CPUs, over Gloo. On GPUs
#   HOROVOD_GPU_OPERATIONS=NCCL scripts/horovod_wheel.sh python
# gives one with NCCL; Horovod's other variables (HOROVOD_NCCL_HOME, HOROVOD_CUDA_HOME, ...) are passed on, but are not
# part of the cache's key: delete the cached folder after changing them. What the build needs (setuptools < 81, wheel,
# packaging, cffi, cloudpickle, psutil, pyyaml) is installed into the given Python's environment.
set -euo pipefail

python=${1:?usage: horovod_wheel.sh PYTHON}
version=0.28.1
key=$("$python" -c 'import platform, sys, torch
print(f"torch{torch.__version__}-{sys.implementation.cache_tag}-{platform.machine()}")')-${HOROVOD_GPU_OPERATIONS:-cpu}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/edpsgd/horovod-$version-$key

if ! compgen -G "$cache/*.whl" >/dev/null; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # torch's headers need C++20, Horovod's CMake files ask for less: raise what CMake passes for those standards.
    cat >"$work/standard.cmake" <<'CMAKE'
set(CMAKE_CXX14_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CXX17_STANDARD_COMPILE_OPTION "-std=c++20")
CMAKE
    cat >"$work/cmake" <<CMAKE
#!/usr/bin/env bash
case " \$* " in
    *" --build "*|*" --version "*) exec cmake "\$@" ;;
    *) exec cmake "\$@" -DCMAKE_PROJECT_INCLUDE="$work/standard.cmake" ;;
esac
CMAKE
    chmod +x "$work/cmake"
    echo "Building Horovod $version for $key: about five minutes, once; log in $cache.log" >&2
    mkdir -p "$(dirname "$cache")"
    "$python" -m pip install --quiet 'setuptools<81' wheel packaging cffi cloudpickle psutil pyyaml >&2
    if ! HOROVOD_CMAKE="$work/cmake" HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 \
        HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
        "$python" -m pip wheel --no-build-isolation --no-deps --no-cache-dir --no-binary horovod \
        --wheel-dir "$work/wheels" "horovod==$version" >"$cache.log" 2>&1; then
        tail -n 30 "$cache.log" >&2
        echo "Horovod did not build; the whole log is $cache.log. It needs cmake, make and a C++20 compiler." >&2
        exit 1
    fi
    # One rename, so that an interrupted run never leaves half a wheel.
    rm -rf "$cache"
    mv "$work/wheels" "$cache"
fi
compgen -G "$cache/*.whl"
