"""How a rank's part in the job ends when a switch ends it."""


class SlotMoved(Exception):  # noqa: N818 - no error: the rank's part in the job is over
    """Another machine has taken this rank's place, or the switch that it was started for is off: end with code 0."""


class SwitchFailedError(RuntimeError):
    """A switch broke after its point of no return, or a partner of it fell silent: the job cannot go on."""


def not_released(generation: int, limit_s: float) -> str:
    """Why a leaver ends by itself after LEAVE."""
    return (
        f"the slot has moved in generation {generation}, and no RELEASE came within {limit_s:g} s: the controller is "
        "away; nothing is lost, the joiner trains on"
    )
