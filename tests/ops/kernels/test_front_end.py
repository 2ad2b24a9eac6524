"""The compiler's view of kernels that run here in its interpreter."""

from __future__ import annotations

import fcntl

import torch

from helpers import front_end


def test_what_the_interpreter_runs_and_the_compiler_refuses_is_said():
    """With the constants, and with the reason, which is the error's cause; and nothing of what can be compiled."""
    out = torch.zeros(8, dtype=torch.int32)
    cases = [{"N": 8, "LESS": less} for less in (8, 4)]
    for case in cases:
        front_end.grows_kernel[(1,)](out, **case)
    assert out.tolist() == [27] * 4 + [4, 5, 6, 7]
    [said] = front_end.refused([front_end.noted(front_end.grows_kernel, (out,), case) for case in cases])
    assert "grows_kernel for {'N': 8, 'LESS': 4}" in said and "Loop-carried variable place" in said


def test_the_last_of_several_processes_compiles_what_all_have_launched(tmp_path, monkeypatch):
    """Of a kernel that several have launched in one way each, one is compiled."""
    asked, out = list[str](), torch.zeros(8, dtype=torch.int32)
    ways = [front_end.noted(front_end.grows_kernel, (out,), {"N": 8, "LESS": less}) for less in (8, 4)]
    monkeypatch.setattr(front_end, "refused", lambda kernels: asked.extend(kernels) or [])
    own = [(tmp_path / f"launches{number}").open("w+") for number in range(3)]
    for file in own:
        fcntl.flock(file, fcntl.LOCK_EX)
    assert front_end._handed_in(tmp_path, own[0], {ways[0]}) == front_end._handed_in(tmp_path, own[1], {*ways}) == []
    own[2].close()  # it has been killed
    with front_end.checked(tmp_path):
        pass
    assert asked in ([ways[0]], [ways[1]]) and not [*tmp_path.glob("launches*")]
    for file in own:
        file.close()


def test_a_process_that_others_took_for_dead_as_it_began_still_has_its_own(tmp_path):
    """It had no lock yet, so the last of them has removed its file."""
    out = torch.zeros(8, dtype=torch.int32)
    ways = {front_end.noted(front_end.grows_kernel, (out,), {"N": 8, "LESS": less}) for less in (8, 4)}
    with (tmp_path / "launches1").open("w+") as own:
        fcntl.flock(own, fcntl.LOCK_EX)
        (tmp_path / "launches1").unlink()
        assert front_end._handed_in(tmp_path, own, ways) == sorted(ways)
