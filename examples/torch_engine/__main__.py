"""`python -m kvrouter_store.torch_engine`."""

from .server import serve
from .settings import EngineSettings

if __name__ == "__main__":
    serve(EngineSettings.from_flags())
