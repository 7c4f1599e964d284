"""A headless Chromium, driven over its own DevTools protocol: no driver but a WebSocket.

Console errors, exceptions, failed requests and breaches of the content security policy are kept:
`Tab.complaints` must be empty at a test's end.
"""

import asyncio
import base64
import contextlib
import itertools
import re
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from tests.fakes.patience import until

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_S = 30.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
    "--no-default-browser-check",
    "--no-first-run",
    "--no-proxy-server",
    "--force-color-profile=srgb",
    "--remote-debugging-port=0",
)
LEVELS = {"error", "warning", "assert"}


def find_chromium() -> str | None:
    """The path of a Chromium of this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserFailed(Exception):
    """The browser did not do as it was told."""


class Tab:
    """One page. `complaints` are what its console and its network say against it."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol."""
        return await self._browser.call(method, params, self._session)

    async def prepare(self) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def look(
        self, width: int, height: int, *, scheme: str = "dark", scale: float = 1
    ) -> None:
        """A window of that size, on a system with that colour scheme, where nothing moves."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        wishes = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wishes.items()]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def go(self, url: str) -> None:
        """Load a page."""
        answer = await self.call("Page.navigate", url=url)
        if "errorText" in answer:
            raise BrowserFailed(f"{url}: {answer['errorText']}")

    async def run(self, expression: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            thrown = details.get("exception", {}).get("description", details.get("text"))
            raise BrowserFailed(f"{expression}: {thrown}")
        return answer["result"].get("value")

    async def until(self, expression: str, patience_s: float = PATIENCE_S) -> None:
        """Return once an expression is true."""
        try:
            await until(lambda: self.run(f"Boolean({expression})"), patience_s, look_s=0.05)
        except TimeoutError:
            text = await self.run("document.body.innerText")
            raise BrowserFailed(f"never true: {expression}\n{text}") from None

    async def text(self, selector: str) -> str:
        """What a reader sees in an element."""
        return str(await self.run(f"document.querySelector({selector!r}).innerText"))

    async def press(self, key: str) -> None:
        """One key."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        more = {"text": "\r"} if key == "Enter" else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **common, **more)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def picture(self, path: Path, *, after_s: float, most: int = 4000) -> None:
        """The page as PNG after a while, its first `most` lines at most."""
        await asyncio.sleep(after_s)
        size = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], most)}
        answer = await self.call(
            "Page.captureScreenshot",
            format="png",
            captureBeyondViewport=True,
            clip={**clip, "scale": 1},
        )
        path.write_bytes(base64.b64decode(answer["data"]))

    def note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", str(details)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in LEVELS:
            said = (str(a.get("value", a.get("description"))) for a in params["args"])
            self.complaints.append(f"console.{params['type']}: {' '.join(said)}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in LEVELS:
            entry = params["entry"]
            self.complaints.append(f"{entry['source']}: {entry['text']} {entry.get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


class Browser:
    """One browser process. `start` makes it an async context."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._tabs: dict[str, Tab] = {}

    async def open(self) -> Tab:
        """A new, empty page in a profile of its own."""
        context = await self.call("Target.createBrowserContext", {})
        where = {"url": "about:blank", "browserContextId": context["browserContextId"]}
        target = await self.call("Target.createTarget", where)
        attach = {"targetId": target["targetId"], "flatten": True}
        session = (await self.call("Target.attachToTarget", attach))["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        await tab.prepare()
        return tab

    async def call(
        self, method: str, params: dict[str, Any], session: str | None = None
    ) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(message)
        async with asyncio.timeout(PATIENCE_S):
            result: dict[str, Any] = await answer
        return result

    async def listen(self) -> None:
        async for message in self._socket:
            data = message.json()
            if "method" in data:
                tab = self._tabs.get(data.get("sessionId", ""))
                if tab is not None:
                    tab.note(data["method"], data["params"])
                continue
            answer = self._asked.pop(data["id"])
            if answer.done():
                continue
            if "error" in data:
                answer.set_exception(BrowserFailed(str(data["error"])))
            else:
                answer.set_result(data["result"])


@contextlib.asynccontextmanager
async def start(executable: str, folder: Path) -> AsyncIterator[Browser]:
    """Run a browser whose profile lies in `folder`; it ends with the context."""
    process = await asyncio.create_subprocess_exec(
        executable,
        *FLAGS,
        f"--user-data-dir={folder}",
        "about:blank",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    drain: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            url = await _address(process)
        drain = asyncio.create_task(_drain(process))
        async with (
            aiohttp.ClientSession() as http,
            http.ws_connect(url, max_msg_size=0) as socket,
        ):
            browser = Browser(socket)
            listening = asyncio.create_task(browser.listen())
            try:
                yield browser
            finally:
                with contextlib.suppress(Exception):
                    await browser.call("Browser.close", {})
                listening.cancel()
                await asyncio.gather(listening, return_exceptions=True)
    finally:
        await _end(process)
        if drain is not None:
            await drain


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    said = b""
    while line := await process.stderr.readline():
        said += line
        found = re.search(rb"DevTools listening on (ws://\S+)", line)
        if found:
            return found[1].decode()
    raise BrowserFailed(f"the browser does not start: {said.decode(errors='replace')[-2000:]}")


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    while await process.stderr.read(65536):
        continue


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            await process.wait()
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
    await process.wait()
