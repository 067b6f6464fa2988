"""Row 23 of the fault list: a number of processes that does not divide the batch."""

from tests.end_to_end.helpers import contents, write_config
from tests.end_to_end.ranks import printed, run, train, wait
from tests.end_to_end.ranks import start as start_ranks

# --- 23: 1 -> 3 processes, which do not divide the batch. (1 -> 2 -> 4 -> 1 is tests/end_to_end/test_exact_resume.py)


def test_fault_23_processes_that_do_not_divide_the_batch_are_refused(packed, tmp_path):
    config, folder = write_config(tmp_path / "recipe.yaml", "classifier", packed), tmp_path / "run"  # batches of 20
    argv = ["--config", str(config), "--run-dir", str(folder)]
    run([*argv, "--max-steps", "2"], tmp_path / "first")
    before, output = contents(folder), tmp_path / "said"
    more = ["--device", "cpu", "--procs", "3"]
    codes = wait(start_ranks(train, str(tmp_path / "notes"), [*argv, *more], None, False, world=3, output=output))
    lines = [line for rank in range(3) for line in printed(output, rank).splitlines()]
    assert set(codes) == {2}, lines
    told = "error: batch_size 20 cannot be shared by 3 processes; make it a multiple of 3"
    assert [line for line in lines if "error" in line or "Traceback" in line] == [told]  # rank 0's alone
    assert contents(folder) == before != {}
    run(argv, tmp_path / "second", world=2)  # the run is as good as it was
