import h5py

import mpistrat as hvd

hvd.init()
with h5py.File("digits.h5") as file:
    x, y = hvd.shard(file["x"][:], file["y"][:])
