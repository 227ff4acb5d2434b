"""Reads tool schemas and the agent's system prompt out of benchmark source code, without importing or running it.

tau-bench: every module of a domain's `tools` folder has a class whose `get_info` returns a literal JSON schema.
tau2-bench: tools are methods decorated with `is_tool`; their schema follows from annotations and Google-style
docstrings. Promise: source of another form is refused by file and line, never guessed at.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.text import reason
from datamodules.files.data_files import RecordedDataError
from datamodules.files.expressions import Template

_SCALARS = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "Dict": "object"}
_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Examples?|Notes?):\s*$", re.MULTILINE)


def tau_tools(folder: Path) -> list[dict[str, Any]]:
    """The JSON schemas of a tau-bench domain, in alphabetical order of module names."""
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    if not modules:
        raise RecordedDataError(f"{folder}: no tools there; the checkout is not the tau-bench its recordings belong to")
    tools = []
    for path in modules:
        for function in _functions(_parse(path)):
            if function.name == "get_info":
                returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
                try:
                    schema = ast.literal_eval(returned[0])
                except (IndexError, ValueError, TypeError, RecursionError) as error:
                    raise RecordedDataError(
                        f"{path}:{function.lineno}: get_info must return a literal schema"
                    ) from error
                if not isinstance(schema, dict):
                    raise RecordedDataError(f"{path}:{function.lineno}: get_info must return a literal schema")
                tools.append(schema)
    return tools


def tau2_tools(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The JSON schemas of a tau2-bench domain in source order, and notes on argument types left open."""
    if not path.is_file():
        raise RecordedDataError(f"{path}: no such file; the checkout is not the tau2-bench its results belong to")
    tools: list[dict[str, Any]] = []
    notes: list[str] = []
    found = (node for node in ast.walk(_parse(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    for function in sorted(found, key=lambda node: node.lineno):
        if any(_called(decorator) == "is_tool" for decorator in function.decorator_list):
            tools.append(_schema(function, path, notes))
    if not tools:
        raise RecordedDataError(f"{path}: no method decorated with is_tool")
    return tools, notes


def read_system_template(path: Path) -> Callable[[str], str]:
    """tau2-bench's system prompt as a function of the domain policy, from the constants of its agent module."""
    if not path.is_file():
        raise RecordedDataError(f"{path}: no such file; the checkout is not a tau2-bench")
    constants: dict[str, str] = {}
    for node in _parse(path).body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            literal = node.value
            called = literal.func if isinstance(literal, ast.Call) else None
            if isinstance(called, ast.Attribute) and called.attr == "strip":
                literal = called.value
            if isinstance(literal, ast.Constant) and isinstance(literal.value, str):
                constants[node.targets[0].id] = literal.value.strip() if called else literal.value
    for name in ("SYSTEM_PROMPT", "AGENT_INSTRUCTION"):
        if name not in constants:
            raise RecordedDataError(f"{path}: no string constant {name}; this version of tau2-bench is not supported")
    try:
        template = Template(constants["SYSTEM_PROMPT"], "SYSTEM_PROMPT")
    except ValueError as error:
        raise RecordedDataError(f"{path}: {error}") from None
    stray = sorted(template.names - {"agent_instruction", "domain_policy"})
    if stray:
        raise RecordedDataError(f"{path}: SYSTEM_PROMPT has {stray}; this version of tau2-bench is not supported")
    instruction = constants["AGENT_INSTRUCTION"]
    return lambda policy: template.fill({"agent_instruction": instruction, "domain_policy": policy}.__getitem__)


def _schema(function: ast.FunctionDef | ast.AsyncFunctionDef, path: Path, notes: list[str]) -> dict[str, Any]:
    description, described = _docstring(ast.get_docstring(function, clean=False) or "")
    given = function.args
    for stray in (*given.posonlyargs, given.vararg, given.kwarg):
        if stray is not None:
            raise RecordedDataError(
                f"{path}:{stray.lineno}: {function.name}({stray.arg}): a schema has no arguments that are"
                " positional only, * or **; this version of tau2-bench is not supported"
            )
    arguments = given.args[1:] if [one.arg for one in given.args[:1]] == ["self"] else given.args
    defaults = dict(zip([a.arg for a in arguments][::-1], given.defaults[::-1], strict=False))
    defaults |= {
        a.arg: value for a, value in zip(given.kwonlyargs, given.kw_defaults, strict=True) if value is not None
    }
    arguments = [*arguments, *given.kwonlyargs]
    properties: dict[str, Any] = {}
    for argument in arguments:
        schema = _type(argument.annotation)
        if schema is None:
            written = ast.unparse(argument.annotation) if argument.annotation else "nothing"
            notes.append(
                f"{path}:{argument.lineno}: {function.name}({argument.arg}): '{written}' is written as any JSON value"
            )
        entry = {**(schema or {}), "title": argument.arg.replace("_", " ").title()}
        if argument.arg in described:
            entry["description"] = described[argument.arg]
        if argument.arg in defaults:
            try:
                entry["default"] = ast.literal_eval(defaults[argument.arg])
            except (ValueError, TypeError, RecursionError) as error:
                raise RecordedDataError(f"{path}:{argument.lineno}: default of {argument.arg} is no literal") from error
        properties[argument.arg] = dict(sorted(entry.items()))
    parameters: dict[str, Any] = {"properties": properties}
    required = [argument.arg for argument in arguments if argument.arg not in defaults]
    if required:
        parameters["required"] = required
    parameters |= {"title": "parameters", "type": "object"}
    return {
        "type": "function",
        "function": {"name": function.name, "description": description, "parameters": parameters},
    }


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Description (first line, empty line, the rest) and argument descriptions of a Google-style docstring."""
    pieces = _SECTION.split(inspect.cleandoc(text))
    short, _, rest = pieces[0].strip().partition("\n")
    described: dict[str, str] = {}
    for section, body in zip(pieces[1::2], pieces[2::2], strict=True):
        if not section.startswith("Arg"):
            continue
        body = inspect.cleandoc(body)
        name = ""
        for line in body.splitlines():
            start = re.match(r"(\w+)(?: \([^)]*\))?:\s*(.*)", line)
            if start:
                name = start[1]
                described[name] = start[2]
            elif name:
                described[name] += "\n" + line.strip()
    return f"{short}\n\n{rest.strip()}" if rest.strip() else short, {k: v.strip() for k, v in described.items()}


def _type(annotation: ast.expr | None) -> dict[str, Any] | None:
    """JSON schema of a type annotation; None where it is missing or names a class of the benchmark's own."""
    if isinstance(annotation, ast.Name) and annotation.id in _SCALARS:
        return {"type": _SCALARS[annotation.id]}
    if isinstance(annotation, ast.Name) and annotation.id in ("list", "List"):
        return {"items": {}, "type": "array"}
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        return _union([annotation.left, annotation.right])
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return {"type": "null"}
    if not isinstance(annotation, ast.Subscript) or not isinstance(annotation.value, ast.Name):
        return None
    inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    match annotation.value.id:
        case "list" | "List":
            items = _type(inner[0])
            return None if items is None else {"items": items, "type": "array"}
        case "dict" | "Dict":
            return {"type": "object"}
        case "Optional":
            return _union([*inner, ast.Constant(None)])
        case "Union":
            return _union(inner)
        case "Literal" if all(isinstance(item, ast.Constant) and isinstance(item.value, str) for item in inner):
            return {"enum": [item.value for item in inner], "type": "string"}  # type: ignore[attr-defined]
    return None


def _union(members: list[ast.expr]) -> dict[str, Any] | None:
    schemas = [_type(member) for member in members]
    return None if None in schemas else {"anyOf": schemas}


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    except SyntaxError as error:
        raise RecordedDataError(f"{path}:{error.lineno}: not valid Python ({error.msg})") from error
    except (OSError, ValueError, RecursionError, MemoryError) as error:  # zero bytes, other encodings, endless nesting
        raise RecordedDataError(f"{path}: not valid Python ({reason(error)})") from error


def _functions(module: ast.Module) -> list[ast.FunctionDef]:
    """Methods of the module's classes, in source order."""
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    return [node for owner in classes for node in owner.body if isinstance(node, ast.FunctionDef)]


def _called(decorator: ast.expr) -> str:
    target = decorator.func if isinstance(decorator, ast.Call) else decorator
    return target.id if isinstance(target, ast.Name) else target.attr if isinstance(target, ast.Attribute) else ""
