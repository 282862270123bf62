"""References to the user's functions and classes: ``package.module:attribute`` or ``path/to/file.py:attribute``.

A reference is text, so a configuration can hold it and any process can load the object. An object that only this
process can reach (a lambda, a function of a notebook) is kept in memory under the reference ``live:name``. The names of
a function's parameters are checked before its first call, and select the arguments that it gets.
"""

import ast
import difflib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rft_platform.common.errors import RftError, UserError
from rft_platform.common.fault_classification import described, is_disk_full, is_out_of_memory, user_place
from rft_platform.common.files import digest_json

T = TypeVar("T")

_UNNAMED = inspect.Parameter.POSITIONAL_ONLY
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_parameters(
    function: Callable[..., Any],
    what: str,
    required: Collection[str],
    optional: Collection[str],
    extra: Collection[str] = (),
) -> None:
    """Raise ``ValueError`` unless ``function`` has every required parameter and only allowed ones.

    ``extra``: names of further arguments that will be passed, so the function must declare them too.
    """
    parameters = inspect.signature(function).parameters.values()
    variadic = [str(parameter) for parameter in parameters if parameter.kind in _VARIADIC]
    names = [parameter.name for parameter in parameters if parameter.kind not in (*_VARIADIC, _UNNAMED)]
    unnamed = [parameter.name for parameter in parameters if parameter.kind is _UNNAMED]
    missing = [name for name in required if name not in names]
    disallowed = [name for name in names if name not in (*required, *optional, *extra)]
    unknown = [name for name in extra if name not in names]
    problems = [
        f"Should not use *args or **kwargs: {variadic}" if variadic else "",
        f"Should not have positional-only parameters: {unnamed}" if unnamed else "",
        f"Missing essential parameters: {missing}" if missing else "",
        f"Contains disallowed parameters: {disallowed}" if disallowed else "",
        f"Has no parameters for the given arguments: {unknown}" if unknown else "",
    ]
    if any(problems):
        name = getattr(function, "__name__", type(function).__name__)
        allowed = f"required: {list(required)}, optional: {list(optional)}"
        raise ValueError(f"{what} validation failed for '{name}': {'; '.join(filter(None, problems))} ({allowed})")


def accepted_arguments(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The ``arguments`` for which ``function`` has a parameter."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


_FILE_MODULE = "rft_user_"  # prefix of the module names of loaded files
_LIVE = "live"
#: This variable keeps the working folder off ``sys.path`` of a Python process. The platform's processes set it to a
#: value that ``drop_safe_path`` recognises.
SAFE_PATH, OWN_SAFE_PATH = "PYTHONSAFEPATH", "rft_platform"
_live_objects: dict[str, Any] = {}
_being_loaded: list[str] = []


def load_object(reference: str, what: str) -> Any:
    """Load the object that ``reference`` names; ``what``: its role in messages (``workflow``). Raises UserError."""
    module_name, separator, attribute = reference.rpartition(":")
    if module_name == _LIVE:
        return _live(attribute, what)
    if not separator and reference.endswith(".py"):
        names = _public_names(Path(reference))
        among = f"; the file defines {', '.join(names)}" if names else ""
        raise UserError(
            f"{what} {reference!r}: names a file without a function; write {reference}:{names[0] if names else 'solve'}"
            f"{among}"
        )
    if not (separator and module_name and attribute):
        raise UserError(f"{what} {reference!r}: expected package.module:attribute or path/to/file.py:attribute")
    find_working_folder()
    try:
        module = _load_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except UserError as error:
        raise UserError(f"{what} {reference!r}: {error}") from error
    except ImportError as error:
        advice = _import_advice(error, module_name, what)
        raise UserError(f"{what} {reference!r}: cannot import {module_name} ({error}); {advice}") from error
    except FileNotFoundError as error:
        files = [file.name for file in Path(module_name).parent.glob("*.py")]
        meant = _meant(Path(module_name).name, files)
        raise UserError(f"{what} {reference!r}: there is no file {module_name}{meant}") from error
    except (Exception, SystemExit) as error:  # a script may end itself, because it is not meant to be imported
        raise UserError(f"{what} {reference!r}: importing {module_name} raised {_cause(error)}") from error
    value: Any = module
    for name in attribute.split("."):
        try:
            value = getattr(value, name)
        except AttributeError as error:
            meant = _meant(name, [known for known in dir(value) if not known.startswith("_")])
            raise UserError(f"{what} {reference!r}: {module_name} has no {attribute!r}{meant}") from error
    return value


def construct(
    kind: Callable[..., T], arguments: Mapping[str, Any], what: str, key: str, given: Sequence[Any] = ()
) -> T:
    """An object of the class ``kind``. Raises UserError if the class does not accept ``arguments``, or raises an error
    other than the platform's own and those of a full disk or memory.

    In messages ``what`` names the class, and ``key`` is the setting that has ``arguments``. ``given``: values of the
    class's first parameters.
    """
    try:
        with suppress(ValueError):  # subclasses of dict and of other types written in C have no signature
            inspect.signature(kind).bind(*given, **arguments)
    except TypeError as error:
        raise UserError(f"{what}: {key} {sorted(arguments)} do not fit ({error})") from error
    try:
        return kind(*given, **arguments)
    except RftError:
        raise
    except Exception as error:
        if is_disk_full(error) or is_out_of_memory(error):
            raise
        raise UserError(f"{what}: its constructor raised {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    place = user_place(error)
    return f"{described(error)}{f' ({place})' if place else ''}"


def _public_names(file: Path) -> list[str]:
    """The functions and classes at the top level of a Python file; empty if it cannot be read."""
    try:
        statements = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return []
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [each.name for each in statements if isinstance(each, kinds) and not each.name.startswith("_")]


def _import_advice(error: ImportError, module_name: str, what: str) -> str:
    """What to check: the version of the package that lacks the module or name, its installation, or the search path."""
    package = (error.name or "").partition(".")[0]
    try:
        installed = importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):  # ValueError: the name is empty
        absent = isinstance(error, ModuleNotFoundError) and error.name == package
        if not absent or package == module_name.partition(".")[0]:
            return "is it on PYTHONPATH?"
        elsewhere = ", or set explorer.workers.python to an interpreter that has it" if what == "workflow" else ""
        return (
            f"{package} is not installed in {sys.executable}: install it there{elsewhere}; if it is a module of your "
            "own, put its folder on PYTHONPATH"
        )
    return f"{package} {installed} is installed: does the code need another version?"


def _meant(name: str, known: Sequence[str]) -> str:
    """The end of a message about an unknown name: the known name most similar to it, if one is similar."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def find_working_folder() -> None:
    """Append the working folder to ``sys.path``.

    It comes last because files such as ``gql.py`` or ``datasets.py`` there must not shadow libraries. The platform's
    processes start without it (``python -P``).
    """
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)


def user_folders() -> list[str]:
    """The folders of ``sys.path`` with the user's modules, without the folders of Python and of installed packages."""
    own = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *site.getsitepackages()}
    roots = [Path(folder).resolve() for folder in own]
    folders = dict.fromkeys(str(Path(folder or ".").resolve()) for folder in sys.path)
    return [folder for folder in folders if not any(Path(folder).is_relative_to(root) for root in roots)]


def drop_safe_path() -> None:
    """Unset the platform's own ``PYTHONSAFEPATH``, so that programs started by user code do not inherit it."""
    if os.environ.get(SAFE_PATH) == OWN_SAFE_PATH:
        del os.environ[SAFE_PATH]


def reference_of(value: Any) -> str:
    """The reference that loads ``value`` in another process; UserError if only this process can reach it.

    An object of a script is named by the script's file. Another process imports that file under a name other than
    ``__main__``, so the script must guard its top-level calls by ``if __name__ == "__main__":``.
    """
    name = getattr(value, "__qualname__", None)
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if not name or module is None or "<" in name:
        raise UserError(
            f"{value!r} cannot be found by name: define it at the top level of a module or script (no lambda, no "
            "function inside a function)"
        )
    file = getattr(module, "__file__", None)
    if module.__name__ != "__main__":
        return f"{file if module.__name__.startswith(_FILE_MODULE) else module.__name__}:{name}"
    if file is None:
        raise UserError(f"{name} was typed into a shell, so no other process can import it: put it into a file")
    spec = getattr(module, "__spec__", None)  # of python -m package.module
    return f"{spec.name}:{name}" if spec is not None else f"{Path(file).resolve()}:{name}"


def module_elsewhere(name: str) -> str:
    """Name of this process's module ``name`` in other processes, and after its file was moved to another folder.

    It differs for a user's file, whose module is named after its folder, too, and for the running script, ``__main__``.
    """
    if name.startswith(_FILE_MODULE):
        return name.rpartition("_")[0]
    main = sys.modules.get("__main__")
    if name != "__main__" or main is None:
        return name
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    return spec.name if spec is not None else name if file is None else f"{_FILE_MODULE}{Path(file).stem}"


def keep_alive(value: Any, what: str) -> str:
    """A reference that loads ``value`` in this process only, for objects that ``reference_of`` refuses.

    ``what`` is the object's role, such as ``judge``. An object replaces an earlier one with the same name and role.
    """
    name = f"{what}/{getattr(value, '__qualname__', type(value).__qualname__)}"
    _live_objects[name] = value
    return f"{_LIVE}:{name}"


def short_name(reference: str) -> str:
    """A short form of a reference for messages, without the folders of a file or the role of a live object."""
    module_name, _, attribute = reference.rpartition(":")
    if module_name == _LIVE:
        return attribute.rpartition("/")[2]
    return f"{Path(module_name).stem}:{attribute}" if module_name.endswith(".py") else reference


def is_live(reference: str) -> bool:
    """Whether a reference is valid only in the process that made it."""
    return reference.startswith(f"{_LIVE}:")


def file_being_loaded() -> str | None:
    """The file of user code that is being imported, or None; its top level must not start anything."""
    return _being_loaded[-1] if _being_loaded else None


def _live(name: str, what: str) -> Any:
    try:
        return _live_objects[name]
    except KeyError:
        raise UserError(
            f"{what} {name.rpartition('/')[2]!r} existed only in the process that trained, so another process "
            "cannot load it: continue from the script or notebook that defines it, or define it "
            "at the top level of a module"
        ) from None


def _file_module(path: Path) -> str:
    return f"{_FILE_MODULE}{path.stem}_{digest_json(str(path))[:8]}"


def _load_file(path: Path) -> ModuleType:
    """The module of a Python file, executed once per process; for the running script, ``__main__`` itself."""
    path = path.resolve(strict=True)
    main = sys.modules.get("__main__")
    running = getattr(main, "__file__", None)
    if main is not None and running is not None and Path(running).resolve() == path:
        return main
    name = _file_module(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it is executed, because dataclasses look up their module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for imports of files in this folder; last, so that they shadow no library
    _being_loaded.append(str(path))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _being_loaded.pop()
    return module
