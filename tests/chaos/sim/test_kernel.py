"""Virtual time: events of one moment happen in the order in which they were requested."""

from __future__ import annotations

from chaos.sim.machine.kernel import Kernel, Process, Task


def test_waits_end_at_their_deadlines_in_the_order_in_which_they_began() -> None:
    """A task woken early waits again, beyond its first alarm; it precedes a task that asked later."""
    kernel, process, seen = Kernel(), Process(1, 0, "worker"), list[tuple[float, str]]()
    tasks: dict[str, Task] = {}

    def wait(name: str, *seconds: float) -> None:
        def run() -> None:
            for timeout_s in seconds:
                kernel.park(timeout_s)
                seen.append((kernel.now, name))

        tasks[name] = kernel.spawn(process, run)

    wait("woken", 5.0, 8.0, 1.0)
    kernel.after(2.0, lambda: kernel.wake(tasks["woken"]))
    kernel.after(3.0, lambda: wait("later", 7.0, 1.0))  # requested before the end of the wait below
    kernel.after(2.0, lambda: wait("shorter", 1.0, 7.0))
    kernel.sleep(20.0)
    assert seen == [
        (2.0, "woken"),
        (3.0, "shorter"),
        (10.0, "woken"),
        (10.0, "later"),
        (10.0, "shorter"),
        (11.0, "woken"),
        (11.0, "later"),
    ]
    kernel.close()
