"""Starts processes fast: a server imports packages once, and forks a process for each request.

This needs Linux; elsewhere each process is a fresh interpreter. ``multiprocessing``'s fork server is not
used, since it would import the user's main script again in every child.

A request is one message with four file descriptors: a connection, standard input, output and error. Over the
connection the child sends its process id, and the server sends the exit code. Closing the connection before
that kills the child and its process group, so that no child outlives the process that requested it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, BinaryIO, NoReturn

from ampaudit.core.confinement import die_with_parent
from ampaudit.core.imports import import_ahead

# the package may only be importable from the directory where this process was started; that directory comes
# last, so that nothing in it shadows another module
_START = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from pkgutil import resolve_name; resolve_name(sys.argv.pop(1))()"
)
_ROOT = str(Path(__file__).resolve().parents[2])
_MAX_IDLE = 2  # idle servers to keep
_NO_PROCESS = (1 << 22) + 1  # above the largest id that Linux gives
_MAX_MESSAGE = 1 << 20
_STOP_SECONDS = 5.0


def start_interpreter(
    target: str,
    *arguments: str,
    environment: Mapping[str, str],
    streams: Sequence[BinaryIO],
    folder: Path | None = None,
    **options: Any,
) -> subprocess.Popen[bytes]:
    """Call a function in a fresh interpreter; arguments as for ``start_forked``, options as for ``Popen``."""
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _START, _ROOT, target, *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=dict(environment),
        cwd=folder,
        start_new_session=True,  # a group of its own, which is killed as a whole
        **options,
    )


_Key = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]  # imports and environment of a server
_Children = dict[int, tuple[int, socket.socket]]  # pidfd -> (process id, connection)


class ForkedProcess:
    """A child of a fork server, with a part of the interface of ``subprocess.Popen``."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._replies = connection.makefile("r", encoding="ascii")
        self.returncode: int | None = None  # exit code as in ``Popen``; ``None`` while the process runs

    @functools.cached_property
    def pid(self) -> int:
        """Id of the process and of its process group; waits until the server has made its imports."""
        with contextlib.suppress(ConnectionError):
            if line := self._replies.readline():
                return int(line)
        self.returncode = -signal.SIGKILL  # the server was killed
        self._close()
        return _NO_PROCESS

    def poll(self) -> int | None:
        """Return the exit code, or ``None`` while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process.

        Raises:
            TimeoutExpired: The process still runs after ``timeout`` seconds.
        """
        if self.pid != _NO_PROCESS and self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._connection, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            # no reply: the server was killed, and its children with it
            self.returncode = int(self._replies.readline() or -signal.SIGKILL)
            self._close()
        assert self.returncode is not None
        return self.returncode

    def _close(self) -> None:
        self._replies.close()
        self._connection.close()

    def kill(self) -> None:
        """Kill the process, but not its children."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class _Server:
    """The client side of a fork server, the process that imports and forks."""

    def __init__(self, imports: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> None:
        self._children: list[ForkedProcess] = []
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.devnull, "r+b") as null:
            self._process = start_interpreter(
                f"{__name__}:serve",
                str(theirs.fileno()),
                *imports,
                environment=dict(environment),
                streams=[null] * 3,
                pass_fds=[theirs.fileno()],
            )

    def fork(self, order: Mapping[str, Any], streams: Sequence[int]) -> ForkedProcess:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"fork"], [theirs.fileno(), *streams])
            ours.sendall(json.dumps(order).encode() + b"\n")
        except OSError:
            ours.close()
            raise
        child = ForkedProcess(ours)
        self._children.append(child)
        return child

    def is_idle(self) -> bool:
        self._children = [child for child in self._children if child.poll() is None]
        return not self._children

    def stop(self) -> None:
        self._control.close()
        if not self._children:  # it may still be importing
            self._process.kill()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@functools.cache
def _servers() -> dict[_Key, _Server]:
    """Return the servers of this process, the least recently used first."""
    servers: dict[_Key, _Server] = {}
    owner = os.getpid()

    def stop_all() -> None:
        while servers and os.getpid() == owner:
            servers.popitem()[1].stop()

    atexit.register(stop_all)
    return servers


def _key(target: str, imports: Sequence[str], environment: Mapping[str, str]) -> _Key:
    """Return the key of the server of a target: what it imports, and its environment."""
    return (target.partition(":")[0], *imports), tuple(sorted(environment.items()))


def prepare_forks(target: str, imports: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the server that ``start_forked`` will use, so that it imports in the meantime."""
    servers, key = _servers(), _key(target, imports, environment)
    if key not in servers:
        servers[key] = _Server(*key)


def start_forked(
    target: str,
    *arguments: str,
    imports: Sequence[str],
    environment: Mapping[str, str],
    variables: Mapping[str, str],
    streams: Sequence[BinaryIO],
    folder: Path | None = None,
) -> ForkedProcess:
    """Call a function in a process forked from a server that has imported its module.

    Args:
        target: ``module:function``, called without arguments.
        arguments: ``sys.argv`` of the process, without the program name.
        imports: Additional modules to import before the fork.
        environment: Environment variables of server and process; libraries read some when they are imported.
        variables: Additional environment variables of the process alone.
        streams: Standard input, output and error.
        folder: Current directory; this process's by default.

    Raises:
        OSError: The server cannot be started, or has ended.
    """
    servers, key = _servers(), _key(target, imports, environment)
    for other in [other for other in servers if servers[other].is_idle() and other != key][:-_MAX_IDLE]:
        servers.pop(other).stop()
    order = {
        "target": target,
        "arguments": arguments,
        "environment": {**environment, **variables},
        "folder": os.fspath(folder or Path.cwd()),
    }
    handles = [stream.fileno() for stream in streams]
    child, server = None, servers.pop(key, None)
    if server is not None:
        with contextlib.suppress(OSError):  # the server was killed
            child = server.fork(order, handles)
        if child is None:
            server.stop()
    if server is None or child is None:
        server = _Server(*key)
        child = server.fork(order, handles)
    servers[key] = server  # last: the most recently used
    return child


def serve() -> NoReturn:
    """Run the server: fork a child for each request until the control socket is closed.

    The arguments of the process are the file descriptor of the control socket and the modules to import.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    import_ahead(*sys.argv[2:])
    children: _Children = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        open_for_requests = True
        while open_for_requests or children:
            for key, _ in selector.select():
                if key.fileobj is control:
                    open_for_requests = _accept(control, selector, children)
                    if not open_for_requests:
                        selector.unregister(control)
                elif isinstance(key.fileobj, int):
                    _reap(key.fd, selector, children)
                elif children.get(key.data, (0, None))[1] is key.fileobj:
                    # the client has closed the connection
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(children[key.data][0], signal.SIGKILL)
                    selector.unregister(key.fileobj)
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    os._exit(0)  # finalizing torch's modules would keep the client waiting for more than a second


def _accept(control: socket.socket, selector: selectors.BaseSelector, children: _Children) -> bool:
    """Fork a child for the next request; return False if the control socket is closed."""
    message, handles, _, _ = socket.recv_fds(control, 16, 4)
    if not message:
        return False
    connection, streams = socket.socket(fileno=handles[0]), handles[1:]
    with connection.makefile("r", encoding="ascii") as lines:
        line = lines.readline(_MAX_MESSAGE)
    if not line.endswith("\n"):  # the client has ended
        connection.close()
        for handle in streams:
            os.close(handle)
        return True
    order = json.loads(line)
    server = os.getpid()
    child = os.fork()
    if child == 0:
        selector.close()
        for handle in (control.fileno(), *children, *(c.fileno() for _, c in children.values())):
            os.close(handle)
        _run(order, streams, connection, server)
    for handle in streams:
        os.close(handle)
    process = os.pidfd_open(child)
    children[process] = child, connection
    selector.register(process, selectors.EVENT_READ)
    selector.register(connection, selectors.EVENT_READ, process)
    return True


def _reap(process: int, selector: selectors.BaseSelector, children: _Children) -> None:
    """Send a child's exit code to its client."""
    child, connection = children.pop(process)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    selector.unregister(process)
    os.close(process)
    with contextlib.suppress(KeyError):
        selector.unregister(connection)
    with contextlib.suppress(OSError), connection:
        connection.sendall(f"{code}\n".encode())


def _run(order: dict[str, Any], streams: Sequence[int], connection: socket.socket, server: int) -> NoReturn:
    """Turn this forked child into the requested process."""
    code = 1
    try:
        die_with_parent(server)
        os.setsid()
        with connection:
            connection.sendall(f"{os.getpid()}\n".encode())
        for number, handle in enumerate(streams):
            os.dup2(handle, number)
            os.close(handle)
        os.environ.clear()
        os.environ.update(order["environment"])
        tempfile.tempdir = None  # an import may have cached it under another environment
        os.chdir(order["folder"])
        sys.argv = [order["target"], *order["arguments"]]
        resolve_name(order["target"])()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(code)
