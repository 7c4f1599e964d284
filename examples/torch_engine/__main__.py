"""`python -m kvrouter_store.torch_engine`."""

from .settings import EngineSettings

if __name__ == "__main__":
    settings = EngineSettings.from_flags()
    from .server import serve  # torch takes seconds to import: not for a wrong flag

    serve(settings)
