"""What every relay process of the bench needs, loaded once: the server that they are forked from imports this."""

import laminar.bench.relay_process  # noqa: F401
from laminar.weights.transport import installed, open_transport

for name in installed():
    open_transport(name)
