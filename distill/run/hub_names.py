"""Names on the Hugging Face hub among the settings of a run."""

from collections.abc import Collection
from pathlib import Path

from omegaconf import OmegaConf

from distill.config import Config
from fsdp_cp.errors import paths_of_the_user
from models.files.hub import encoder_files, network_files, resolve


@paths_of_the_user()
def resolve_hub_names(config: Config, roles: Collection[str] = ("teacher", "student", "fake")) -> None:
    """Replace hub names of ``roles`` and encoders in ``config`` by ``owner/name@COMMIT``, and download what they need
    (``dry_run`` and ``plan`` do not). A run that resumes takes the commits of its ``config.yaml``. A collective."""
    settings = {f"{role}.checkpoint": (getattr(config, role), "checkpoint", network_files) for role in roles}
    if hasattr(config.data, "encoders"):
        settings["data.encoders"] = (config.data, "encoders", encoder_files)
    names = {setting: (getattr(owner, name), wanted) for setting, (owner, name, wanted) in settings.items()}
    resolved = resolve(names, recorded=_recorded(config, names), download=not (config.dry_run or config.plan))
    for setting, value in resolved.items():
        owner, name, _ = settings[setting]
        setattr(owner, name, value)


def _recorded(config: Config, names: Collection[str]) -> dict[str, str]:
    """Return the settings ``names`` in the ``config.yaml`` of the run that resumes, if there is one."""
    resume = config.checkpoint.resume
    folders = {"auto": [Path(config.run_dir)], "never": []}.get(resume, [Path(resume), Path(resume).parent.parent])
    for file in (folder / "config.yaml" for folder in folders):
        if file.is_file():
            try:
                earlier = OmegaConf.load(file)
                return {name: value for name in names if isinstance(value := OmegaConf.select(earlier, name), str)}
            except Exception:  # damaged: the checks of the checkpoint report it
                return {}
    return {}
