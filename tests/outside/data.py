"""External data set: moving shapes under another name. An entry point (``fsdp_cp.data_sets``) registers it."""

from dataclasses import dataclass

from distill.data.settings import MovingShapesSettings


@dataclass(kw_only=True)
class OutsideShapes(MovingShapesSettings):
    """``data=outside_shapes``."""

    name: str = "outside_shapes"
