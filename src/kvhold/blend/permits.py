"""Permits to blend, kept as JSON files. Any thread.

found = Permits.of(config.blend).find(permit_model(namespace), selector_text(selector))
"""

import contextlib
import logging
import os
import shlex
import stat
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvhold.core.blend_config import BlendConfig
from kvhold.core.encoding import canonical
from kvhold.core.errors import UNDECODABLE, ConfigError
from kvhold.core.keys import Namespace

log = logging.getLogger(__name__)

_MOST_BYTES = 16 << 10
_Text = Annotated[str, Meta(min_length=1, max_length=1024)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Change = Annotated[float, Meta(ge=-1, le=1)]
_Nats = Annotated[float, Meta(ge=0, le=1e9)]


class Permit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurement of a model and a selector.

    f1_low, f1_high: 95 % interval of f1 - f1_full
    kl, kl_high: mean KL(full || blended) of the next token, in nats, and its 95 % interval's end
    kl_usual: 95 % of the prompts have this or less
    granted: ISO 8601
    """

    model: _Text
    selector: _Text
    data: _Text
    prompts: Annotated[int, Meta(ge=1)]
    f1: _Share
    f1_full: _Share
    f1_low: _Change
    f1_high: _Change
    exact_match: _Share
    exact_match_full: _Share
    kl: _Nats
    kl_high: _Nats
    kl_usual: _Nats
    max_f1_loss: _Share
    max_kl: _Nats | None
    granted: _Text
    version: _Text

    @property
    def digest(self) -> str:
        return blake2b(msgspec.json.encode(self), digest_size=8).hexdigest()


class Withdrawal(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    withdrawn: str


@dataclass(frozen=True)
class BlendRefusal:
    """fix: a command; str(): for logs"""

    reason: str
    fix: str

    def __str__(self) -> str:
        return f"served without blend: {self.reason}; run {self.fix}"


def permit_model(namespace: Namespace) -> str:
    """The same in all engines for one `model_id`."""
    name = namespace.model.removeprefix("named:")
    return f"{name} lora={namespace.lora}" if namespace.lora else name


def permit_options(namespace: Namespace) -> str:
    """Of the command that grants a permit."""
    parts = [shlex.quote(namespace.title or "MODEL")]
    if namespace.model.startswith("named:"):
        parts += ["--model-id", shlex.quote(namespace.model.removeprefix("named:"))]
    dtype = namespace.dtype.removeprefix("torch.")
    return " ".join([*parts, *(["--dtype", dtype] if dtype != "float32" else [])])


class Permits:
    def __init__(
        self, folder: Path, *, max_f1_loss: float = 0.01, max_kl: float | None = None
    ) -> None:
        self.folder = folder
        self._max_f1_loss = max_f1_loss
        self._max_kl = max_kl
        self._withdrawn: dict[str, str] = {}

    @classmethod
    def of(cls, config: BlendConfig) -> "Permits":
        folder = Path(config.permits).expanduser() if config.permits else _default_folder()
        return cls(folder.absolute(), max_f1_loss=config.max_f1_loss, max_kl=config.max_kl)

    def find(self, model: str, selector: str, *, options: str = "MODEL") -> Permit | BlendRefusal:
        """options: of the command that the refusal gives"""
        fix = f"kvhold verify --blend {options} --selector {shlex.quote(selector)}"
        path = self._path(model, selector)
        try:
            permit = msgspec.json.decode(_read(path), type=Permit)
            reason = self._reason_against(permit, model, selector) or self._withdrawal(path, permit)
        except FileNotFoundError:
            return BlendRefusal(f"there is no permit for {selector!r} with this model", fix)
        except (OSError, *UNDECODABLE, _NoPermit) as error:
            return BlendRefusal(f"{path} is no permit: {error}", fix)
        return BlendRefusal(reason, fix) if reason else permit

    def grant(self, permit: Permit) -> Path:
        """Replaces an earlier permit and its withdrawal. Raises ConfigError."""
        path = self._path(permit.model, permit.selector)
        raw = msgspec.json.format(msgspec.json.encode(permit))
        try:
            msgspec.json.decode(raw, type=Permit)
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(path, raw)
            for old in self.folder.glob(f"{path.stem}-*.withdrawn"):
                if old != self._withdrawal_path(path, permit):
                    old.unlink(missing_ok=True)
        except msgspec.ValidationError as error:
            raise ConfigError(f"not a permit: {error}") from None
        except OSError as error:
            raise ConfigError(f"blend.permits: cannot write {path}: {error.strerror}") from None
        return path

    def withdraw(self, permit: Permit, reason: str) -> None:
        """Until the next grant; if the folder cannot be written, in this process only."""
        self._withdrawn[permit.digest] = reason
        path = self._path(permit.model, permit.selector)
        record = Withdrawal(reason=reason, withdrawn=now())
        try:
            _write(self._withdrawal_path(path, permit), msgspec.json.encode(record))
        except OSError as error:
            log.warning(
                "kvhold: cannot withdraw %s for other processes: %s; remove it", path, error
            )

    def _reason_against(self, permit: Permit, model: str, selector: str) -> str:
        if (permit.model, permit.selector) != (model, selector):
            raise _NoPermit("it is for another model or selector")
        if permit.f1_low > permit.f1_high:
            raise _NoPermit("f1_low is above f1_high")
        if permit.f1_low < -self._max_f1_loss:
            return (
                f"F1 may be {-permit.f1_low:.3f} lower by the measurement; blend.max_f1_loss is "
                f"{self._max_f1_loss:g}"
            )
        if self._max_kl is not None and permit.kl_high > self._max_kl:
            return (
                f"the KL divergence may be {permit.kl_high:.3g} by the measurement; blend.max_kl "
                f"is {self._max_kl:g}"
            )
        return ""

    def _withdrawal(self, path: Path, permit: Permit) -> str:
        if reason := self._withdrawn.get(permit.digest):
            return f"the permit was withdrawn: {reason}"
        try:
            found = msgspec.json.decode(
                _read(self._withdrawal_path(path, permit)), type=Withdrawal
            ).reason
        except FileNotFoundError:
            return ""
        except (OSError, *UNDECODABLE, _NoPermit):
            found = "its record cannot be read"
        return f"the permit was withdrawn: {found}"

    def _path(self, model: str, selector: str) -> Path:
        name = blake2b(canonical(["kvhold-permit-1", model, selector]), digest_size=16)
        return self.folder / f"{name.hexdigest()}.json"

    def _withdrawal_path(self, path: Path, permit: Permit) -> Path:
        return self.folder / f"{path.stem}-{permit.digest}.withdrawn"


def now() -> str:
    return datetime.now(UTC).isoformat()


class _NoPermit(Exception):
    pass


def _default_folder() -> Path:
    data = Path(os.environ.get("XDG_DATA_HOME", ""))
    root = data if data.is_absolute() else Path("~/.local/share").expanduser()
    return root / "kvhold" / "permits"


def _read(path: Path) -> bytes:
    # O_NONBLOCK: a pipe must not block
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _NoPermit("it is no file")
        raw = file.read(_MOST_BYTES + 1)
    if len(raw) > _MOST_BYTES:
        raise _NoPermit(f"it has more than {_MOST_BYTES} bytes")
    return raw


def _write(path: Path, raw: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as draft:
        try:
            draft.write(raw)
            draft.flush()
            os.fsync(draft.fileno())
            Path(draft.name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(draft.name).unlink()
            raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
