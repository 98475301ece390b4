"""Finishes what living engines have under way, before process groups end."""

from ds_lgamp.checkpoint.saver import wait_for_all
from ds_lgamp.integrations.deepspeed.checkpoint.live import end_all
from ds_lgamp.watch.this_rank import this_rank


def finish_engines() -> None:
    """Waits for the gathers and saves that engines have under way, and ends their live states. Collective over all
    ranks; raises CheckpointError on every rank if a save failed."""
    for agree in list(this_rank.agreements):
        # Once, also where ranks disagree.
        del this_rank.agreements[agree]
        agree()
    for engine in this_rank.engines:
        engine.finish_gathers()
    try:
        wait_for_all()
    finally:
        # If a save has failed, live states are all that the next run can resume from.
        end_all()
