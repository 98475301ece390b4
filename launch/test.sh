#!/usr/bin/env bash
# Installs ds_lgamp and the packages its tests need, and runs the checks: the default set of tests, with --all in front
# all of them, on new examples where hypothesis draws them, three minutes of disturbed jobs, and 2,000 random trainings.
# With --some, a sixteenth of the slow ones, by the commit, one minute of such jobs, and 100 such trainings; none of the
# tests of time, which a busy machine spoils. A test that fails is run once more by itself, before it makes the run red.
# Passes other arguments on to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/install.sh
install_ds_lgamp megatron,transformers,plot,test,dev

more= all= part= examples=same_examples minutes=3 trainings=2000
case "${1:-}" in
    --all) more=1 all=1 examples=new_examples ;;
    --some)
        commit=$(git rev-parse --short=8 HEAD 2>/dev/null || echo 0)
        more=1 part="--part=$((0x${commit::8} % 16))/16" minutes=1 trainings=100
        ;;
esac
if [ -n "$more" ]; then
    shift
fi

ruff check .
ruff format --check .
python -m mypy
# Ranks would otherwise compile the tests they import, each anew.
unset PYTHONDONTWRITEBYTECODE
# One process runs all tests of a file, because they share the ranks that its fixtures start. Files run in the order of
# their names: ordered by their number of tests, a few long ones would come last, when one process has nothing to do.
# Tests wait for ranks more than half of the time, so three processes keep two cores busy.
processes=$(($(nproc) * 3 / 2))
in_processes="--numprocesses $((processes < 8 ? processes : 8)) --dist loadfile --no-loadscope-reorder"
# A part that fails hides no other.
failed=0
run() {
    python -m pytest --once-more --hypothesis-profile=$examples "$@" || failed=$?
}
# shellcheck disable=SC2086
run $in_processes "$@"
if [ -n "$more" ]; then
    # shellcheck disable=SC2086
    run $in_processes -m "slow and not timing" $part "$@"
    if [ -n "$all" ]; then
        run -m timing "$@"
    fi
    # A job that ends badly is printed, and can be repeated by itself.
    python -m testing.chaos --minutes $minutes --seed 1 || failed=$?
    # A training that goes wrong is printed by its number: --only NUMBER runs it again, and prints its script.
    python -m testing.fuzz trainings --count $trainings --seed 1 || failed=$?
fi
exit "$failed"
