"""``hvd.spark``: ranks on the executors of Apache Spark, and their rows from a DataFrame.

Neither pyspark nor pyarrow is imported before it is used.
"""

from hvd_keras.spark.rows import Rows, shard
from hvd_keras.spark.run import HorovodRunner, run

__all__ = ["HorovodRunner", "Rows", "run", "shard"]
