# Sourced by quickstart.sh and test.sh: makes .venv, installs ds_lgamp with the extras named in $1, and activates it.
#
# The active environment's torch stays if it is 2.6 or newer. Otherwise the function installs the pinned one, from
# TORCH_INDEX_URL if that is set, else from pip's default index. On a machine without GPU, set TORCH_INDEX_URL to
# PyTorch's index of CPU builds.

install_ds_lgamp() {
    local extras=$1 constraints=launch/constraints.txt
    local active_site
    active_site=$(python3 launch/active_torch.py) || active_site=
    if [ ! -x .venv/bin/python ]; then
        python3 -m venv --clear .venv
    elif ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        # Other tools make environments without pip.
        .venv/bin/python -m ensurepip >/dev/null
    fi
    if ! .venv/bin/python launch/active_torch.py >/dev/null; then
        if [ -n "$active_site" ]; then
            # Adds the active environment's packages after the venv's own. --system-site-packages would add the base
            # interpreter's packages instead.
            .venv/bin/python -c 'import sys, sysconfig
with open(sysconfig.get_path("purelib") + "/active_environment.pth", "w") as file:
    print(sys.argv[1], file=file)' "$active_site"
        else
            if [ -z "${TORCH_INDEX_URL:-}" ] && ! command -v nvidia-smi >/dev/null; then
                echo "No GPU found: should pip download a CUDA build of torch now, stop and set TORCH_INDEX_URL" \
                    "to PyTorch's index of CPU builds."
            fi
            .venv/bin/python -m pip install --quiet ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} \
                "$(grep '^torch==' "$constraints")"
        fi
    fi
    # What was installed once needs no network, such as on the nodes of a cluster.
    local installed=.venv/ds_lgamp_installed sources
    sources=$(pwd | cat - pyproject.toml "$constraints" | cksum)
    if [ "$(head -n 1 "$installed" 2>/dev/null)" != "$sources" ] || ! grep -qxF "$extras" "$installed"; then
        grep -v '^torch==' "$constraints" >.venv/constraints.txt
        .venv/bin/python -m pip install --quiet --constraint .venv/constraints.txt --editable ".[$extras]"
        [ "$(head -n 1 "$installed" 2>/dev/null)" = "$sources" ] || echo "$sources" >"$installed"
        echo "$extras" >>"$installed"
    fi
    # shellcheck disable=SC1091
    source .venv/bin/activate
}
