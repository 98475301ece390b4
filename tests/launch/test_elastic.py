"""launch/elastic.sh: a run that loses ranks and nodes, and gains some, has the loss curve of one that did not."""

import pytest

from testing.elastic import Job, job

STEPS = 40
CONFIG = {
    "train_batch_size": 12,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 0.1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.01, "total_num_steps": STEPS},
    },
    "zero_optimization": {"stage": 3},
    "ds_lgamp": {},
}


def words(seconds: float, pipeline_ranks: int) -> list:
    steps = ["--steps", STEPS, "--save-interval", 2]
    return [*steps, "--seconds", seconds, "--pipeline-ranks", pipeline_ranks]


def ranks_are(ranks: int):
    return lambda step: step.ranks == ranks


def curve(done: Job) -> dict[int, tuple[float, float]]:
    """Returns loss and learning rate of every step. A step that was made again had the same."""
    found: dict[int, tuple[float, float]] = {}
    for step in done.steps():
        assert found.setdefault(step.step, (step.loss, step.rate)) == pytest.approx((step.loss, step.rate), rel=1e-5)
    return found


def lose_a_node_and_a_rank(run: Job) -> None:
    """2 nodes, 1, and 2 again, one of whose ranks dies."""
    run.start("a")
    run.start("b")
    run.wait_for(lambda step: step.ranks == 2 and step.step > 4)
    run.kill_node("b")
    run.wait_for(ranks_are(1))
    run.start("b")
    run.wait_for(ranks_are(2))
    run.kill_rank("b")
    run.wait_for(ranks_are(2))


def lose_half_of_the_nodes(run: Job) -> None:
    """4 nodes, 3, 2 and 3 again."""
    for node in "abcd":
        run.start(node)
    run.wait_for(lambda step: step.ranks == 8 and step.step > 4)
    run.kill_node("d")
    run.wait_for(ranks_are(6))
    run.kill_node("c")
    run.wait_for(ranks_are(4))
    run.start("c")
    run.wait_for(ranks_are(6))


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "events"),
    [
        pytest.param("1:2", 1, lose_a_node_and_a_rank, marks=pytest.mark.slow),
        pytest.param("2:4", 2, lose_half_of_the_nodes, marks=pytest.mark.full),
    ],
)
def test_a_run_that_loses_ranks_and_nodes_goes_on(nodes, ranks_per_node, events, tmp_path):
    """Pipelines are as long as nodes have ranks."""
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    with job(tmp_path / "whole", "1", 1, CONFIG, *words(0, 1)) as whole:
        whole.start("only")
        whole.finish()
    with job(tmp_path / "broken", nodes, ranks_per_node, CONFIG, *words(0.5, ranks_per_node)) as broken:
        events(broken)
        broken.finish()
    expected = curve(whole)
    assert list(expected) == list(range(1, STEPS + 1))
    assert curve(broken) == {step: pytest.approx(values, rel=1e-5) for step, values in expected.items()}
