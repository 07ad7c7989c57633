import os

import mpistrat as hvd
from mpistrat.api import handshake

if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    handshake.__version__ = "0.0.9"
hvd.init()
