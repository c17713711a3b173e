"""``Checkpoint``: saves the whole state of a training, and restores it after a restart."""

from hvd_keras.callbacks.base import Callback

from hvd_keras.hooks.checkpoints import Checkpoints


class Checkpoint(Checkpoints, Callback):  # type: ignore[misc]
    """Saves the whole state of the training, and restores the last intact checkpoint.

    After a crash, start the script again, unchanged: ``fit`` continues at the epoch and batch of
    the last checkpoint, or returns at once if all epochs are done. On the same number of ranks the
    final weights are, bit for bit, those of a run without the crash, if the order of an epoch's
    data depends on its number only, as that of ``hvd.data.shard`` does.

    Saved are weights, moving statistics, optimizer variables including the learning rate, epoch and
    batch, and the states of random generators: those of layers (dropout) and the global ones of
    Python and NumPy. Not saved is the Python state of other callbacks, such as the patience of
    ``EarlyStopping``. docs/checkpoints.md describes other data, restarts on another number of
    ranks, and the files.

    The values are taken between two steps and written by a thread while training goes on. Until
    that is done, rank 0 holds them twice, as far as training has changed them.

    Rank 0 alone reads and writes, so the ranks need no shared file system, except for tables that
    are divided between ranks (``hvd.layers``) and an optimizer's state in shares
    (``shard_state=True``), of which all write and read their parts.

    In ``fit``, put it after the callbacks that change the model or the optimizer. A script may pass
    one instance to several ``fit``, one after the other: started again, it returns from those that
    were complete without training, and continues in the one that was interrupted.

    Args:
        directory: the folder of the files, on rank 0; use it for one training only.
        keep: the number of checkpoints to keep, 1 or more. With 2 or more, a damaged last one can
            be replaced by the one before.
        save_freq: "epoch", or the number of batches after which to save, besides the epoch's end.
        restore: False trains from scratch; the first checkpoint then replaces all existing ones.
        process_set: the ranks that train the model; the first of them reads and writes.

    Raises:
        ValueError: an argument is impossible, or tf_keras is in use. In ``fit``, on every rank: the
            model has no variables and its step cannot be traced to create them; the checkpoint
            belongs to another model; or the ranks' arguments differ.
        RuntimeError: (in ``fit``, on every rank) all existing checkpoints are damaged.
        OSError: (in ``fit``, on every rank, at the next save or the end at the latest) a checkpoint
            cannot be written, for example because the disk is full. Earlier ones remain.

    Example:
        checkpoint = hvd.callbacks.Checkpoint("checkpoints", save_freq=100)
        data = hvd.data.shard((x, y), batch_size=32)
        broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(data, epochs=10, callbacks=[broadcast, checkpoint])
    """
