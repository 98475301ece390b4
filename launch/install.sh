# Sourced by quickstart.sh and test.sh: makes .venv, installs ds_lgamp with the extras named in $1, and activates it.
#
# A torch in the active environment is used as it is. Otherwise the pinned one is installed: from TORCH_INDEX_URL if that
# is set, else from pip's usual index. On a machine without GPU, let TORCH_INDEX_URL name PyTorch's index of CPU builds.

install_ds_lgamp() {
    local extras=$1 constraints=launch/constraints.txt pinned=.venv/constraints.txt
    local torch_site
    torch_site=$(python3 -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])' 2>/dev/null) || torch_site=
    [ -x .venv/bin/python ] || python3 -m venv .venv
    grep -v '^torch==' "$constraints" >"$pinned"
    if .venv/bin/python -c 'import torch' 2>/dev/null; then
        :
    elif [ -n "$torch_site" ]; then
        echo "$torch_site" >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/active_environment.pth"
    else
        if [ -z "${TORCH_INDEX_URL:-}" ] && ! command -v nvidia-smi >/dev/null; then
            echo "No GPU found: if a CUDA build of torch is about to be downloaded, set TORCH_INDEX_URL to PyTorch's CPU index."
        fi
        .venv/bin/pip install --quiet ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$(grep '^torch==' "$constraints")"
    fi
    .venv/bin/pip install --quiet --constraint "$pinned" --editable ".[$extras]"
    # shellcheck disable=SC1091
    source .venv/bin/activate
}
