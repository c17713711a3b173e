"""Every layer, loss and metric that Keras exports, with arguments, and what to expect of it in fit.

An expression is evaluated in ``keras.layers``, ``keras.losses`` or ``keras.metrics``, unless the
installed Keras has no such class.
"""

import inspect
import re

import keras

# By the kind of input; see compare.py.
LAYERS = {
    "vector": [
        *('Activation("softmax")', "ActivityRegularization(0.01, 0.01)", "AlphaDropout(0.5)"),
        *("BatchNormalization(synchronized=True)", "BatchNormalization()", "Dense(3)"),
        *('Dense(3, activity_regularizer="l2", kernel_regularizer="l1")', "Dropout(0.5)"),
        *("Dense(3, activation=lambda x: keras.ops.softmax(x, 0))", "ELU()", "LeakyReLU()"),
        *('EinsumDense("ab,bc->ac", 5)', "GaussianDropout(0.5)"),
        *("GaussianNoise(0.5)", "Identity()", "LayerNormalization()", "RMSNormalization()"),
        *("Lambda(lambda x: x * 2)", "Lambda(lambda x: x - keras.ops.mean(x, 0))", "PReLU()"),
        *("Normalization(mean=1.0, variance=2.0)", "ReLU()", "RepeatVector(2)", "Reshape((3, 2))"),
        *("Softmax()", "Softmax(axis=0)", "Softmax(axis=-2)", "SpectralNormalization(Dense(3))"),
        *("UnitNormalization()", "UnitNormalization(axis=0)", "UnitNormalization(axis=-2)"),
        *("Discretization(bin_boundaries=[-1.0, 0.0, 1.0])", "Rescaling(2.0)", "Flatten()"),
    ],
    "pair": [
        *("Add()", "Average()", "Concatenate()", "Dot(1)", "Maximum()"),
        *("Minimum()", "Multiply()", "Subtract()"),
    ],
    "sequence": [
        *("AdaptiveAveragePooling1D(2)", "AdaptiveMaxPooling1D(2)", "AveragePooling1D(2)"),
        *("Bidirectional(LSTM(3))", "Conv1D(3, 2)", "Conv1DTranspose(3, 2)", "Cropping1D()"),
        *("DepthwiseConv1D(2)", "GlobalAveragePooling1D()", "GlobalMaxPool1D()", "GRU(3)"),
        *("GroupNormalization(2)", "LayerNormalization(axis=(1, 2))", "LSTM(3)", "MaxPool1D(2)"),
        *("Permute((2, 1))", "PReLU(shared_axes=[1])", "RNN(StackedRNNCells([GRUCell(2)]))"),
        *("RNN(LSTMCell(3))", "RNN(SimpleRNNCell(3))", "SeparableConv1D(3, 2)", "SimpleRNN(3)"),
        *("SpatialDropout1D(0.5)", "TimeDistributed(Dense(3))", "UpSampling1D()"),
        *("ZeroPadding1D()", "LSTM(3, dropout=0.5)", "LSTM(3, return_sequences=True)"),
        *("UnitNormalization(axis=(-1, -2))", "Softmax(axis=-2)"),
    ],
    "masked": [
        *("LSTM(3)", "GRU(3)", "Bidirectional(SimpleRNN(3))", "TimeDistributed(Dense(3))"),
        *("GlobalAveragePooling1D()", "LayerNormalization()", "BatchNormalization()"),
    ],
    "attention": [
        *("AdditiveAttention()", "Attention()", "Attention(use_scale=True, dropout=0.5)"),
        *("GroupQueryAttention(2, 2, 1)", "MultiHeadAttention(2, 3)"),
        *("MultiHeadAttention(2, 3, dropout=0.5)", "MultiHeadAttention(2, 3, attention_axes=1)"),
    ],
    "masked attention": ["AdditiveAttention()", "Attention()", "MultiHeadAttention(2, 3)"],
    "padded": ["Masking()"],
    "image": [
        *("AdaptiveAveragePooling2D(2)", "AdaptiveMaxPooling2D(2)", "AveragePooling2D(2)"),
        *("Conv2D(3, 2)", "Conv2DTranspose(3, 2)", "Cropping2D()", "DepthwiseConv2D(2)"),
        *("GlobalAveragePooling2D()", "GlobalMaxPool2D()", "MaxPool2D(2)", "SeparableConv2D(3, 2)"),
        *("SpatialDropout2D(0.5)", "UpSampling2D()", "ZeroPadding2D()", "ConvLSTM1D(2, 2)"),
        *("BatchNormalization(axis=1, synchronized=True)", "CenterCrop(6, 6)", "Resizing(6, 6)"),
        *("GroupNormalization(1)", "LayerNormalization(axis=(-3, -2, -1))"),
    ],
    "volume": [
        *("AdaptiveAveragePooling3D(2)", "AdaptiveMaxPooling3D(2)", "AveragePooling3D(2)"),
        *("Conv3D(3, 2)", "Conv3DTranspose(3, 2)", "Cropping3D()", "GlobalAveragePooling3D()"),
        *("GlobalMaxPool3D()", "MaxPool3D(2)", "SpatialDropout3D(0.5)", "UpSampling3D()"),
        *("ZeroPadding3D()", "ConvLSTM2D(2, 2)"),
    ],
    "frames": ["ConvLSTM3D(2, 2)"],
    "pixels": [
        *("AugMix((0, 255))", "AutoContrast((0, 255))", "Equalization((0, 255))", "CutMix()"),
        *("ContrastLimitedAdaptiveHistogramEqualization()", "MixUp()", "RandAugment((0, 255))"),
        *("Pipeline([Rescaling(2.0), Identity()])", "RandomBrightness(0.5)", "RandomContrast(0.5)"),
        *("RandomColorDegeneration(0.5)", "RandomColorJitter((0, 255), 0.5)", "RandomCrop(6, 6)"),
        *("RandomElasticTransform()", "RandomErasing()", "RandomFlip()", "RandomGaussianBlur()"),
        *("RandomGrayscale()", "RandomHue(0.5)", "RandomInvert()", "RandomPerspective()"),
        *("RandomPosterization(4)", "RandomRotation(0.5)", "RandomSaturation(0.5)"),
        *("RandomSharpness(0.5)", "RandomShear(0.5, 0.5)", "RandomTranslation(0.5, 0.5)"),
        *("RandomZoom(0.5)", "Solarization(value_range=(0, 255))"),
    ],
    "signal": ["MelSpectrogram(32, 16, 32)"],
    "channels": ["STFTSpectrogram(frame_length=16, frame_step=8)"],
    "words": [
        *('CategoryEncoding(20, "multi_hot")', "Embedding(20, 3)", "Hashing(5)"),
        *("Embedding(20, 3, mask_zero=True)", "IntegerLookup(vocabulary=[*range(9)])"),
        *("ReversibleEmbedding(20, 3)",),
    ],
    "crossed": ["HashedCrossing(5)"],
    "text": [
        *('StringLookup(vocabulary=["a", "b"])',),
        *('TextVectorization(vocabulary=["a", "b"], output_sequence_length=3)',),
    ],
}
# These are no layers for a model of TensorFlow, or abstract, or take boxes and not tensors.
NOT_TRIED = {
    *("FlaxLayer", "JaxLayer", "TorchModuleWrapper", "TFSMLayer", "InputSpec", "InputLayer"),
    *("Layer", "Wrapper", "MaxNumBoundingBoxes", "Loss", "Metric"),
}

# By the kind of output. Each is tried with each reduction, and with sample weights.
LOSSES = {
    "classes": [
        *("BinaryCrossentropy()", "BinaryFocalCrossentropy()", "CategoricalCrossentropy()"),
        *("CategoricalFocalCrossentropy()", "CategoricalHinge()", "CosineSimilarity()", "Dice()"),
        *("Dice(axis=1)", "Hinge()", "Huber()"),
        *("KLDivergence()", "LogCosh()", "MeanAbsoluteError()", "MeanAbsolutePercentageError()"),
        *("MeanSquaredError()", "MeanSquaredLogarithmicError()", "Poisson()", "SquaredHinge()"),
        *("Tversky()", "Tversky(axis=1)"),
    ],
    # Their values are no rows, so that Keras takes no weights.
    "unweighted": [
        *("CosineSimilarity(axis=0)", "CosineSimilarity(axis=-2)", "Dice(axis=0)"),
        *("CategoricalCrossentropy(axis=0)", "CategoricalFocalCrossentropy(axis=0)"),
        *("BinaryCrossentropy(axis=0)", "BinaryFocalCrossentropy(axis=0)", "Tversky(axis=0)"),
    ],
    "labels": [
        *("CategoricalGeneralizedCrossEntropy()", "Circle()", "SparseCategoricalCrossentropy()"),
        *("SparseCategoricalCrossentropy(ignore_class=1)",),
    ],
    "masked": ["MeanSquaredError()", "CosineSimilarity()", "CategoricalCrossentropy()"],
    "steps": ["CTC()"],
}
REDUCTIONS = ["sum_over_batch_size", "sum", "mean_with_sample_weight", "none"]

METRICS = {
    "classes": [
        *("AUC()", "Accuracy()", "BinaryAccuracy()", "BinaryCrossentropy()", "BinaryIoU()"),
        *("CategoricalAccuracy()", "CategoricalCrossentropy()", "CategoricalHinge()"),
        *("ConcordanceCorrelation()", "ConcordanceCorrelation(axis=0)", "CosineSimilarity()"),
        *("CosineSimilarity(axis=0)", "F1Score()", 'F1Score("macro")', 'FBetaScore("weighted")'),
        *("FalseNegatives()", "FalsePositives()", "Hinge()", "KLDivergence()", "LogCoshError()"),
        *("MeanAbsoluteError()", "MeanAbsolutePercentageError()", "MeanSquaredError()"),
        *("MeanSquaredLogarithmicError()", "MeanMetricWrapper(keras.losses.mean_squared_error)"),
        *("OneHotIoU(4, [0])", "OneHotMeanIoU(4)", "PearsonCorrelation()", "Poisson()"),
        *("PearsonCorrelation(axis=0)", "Precision()", "PrecisionAtRecall(0.5)", "R2Score()"),
        *("Recall()", "RecallAtPrecision(0.5)", "RootMeanSquaredError()", "SquaredHinge()"),
        *("SensitivityAtSpecificity(0.5)", "SpecificityAtSensitivity(0.5)", "TrueNegatives()"),
        *("TopKCategoricalAccuracy(2)", "TruePositives()", "CategoricalCrossentropy(axis=0)"),
    ],
    "labels": [
        *("IoU(4, [0], sparse_y_pred=False)", "MeanIoU(4, sparse_y_pred=False)"),
        *("SparseCategoricalAccuracy()", "SparseCategoricalCrossentropy()"),
        *("SparseTopKCategoricalAccuracy(2)",),
    ],
    "values": ["Mean()", "Sum()"],
}


# Documented: unsynchronised statistics.
DIFFERENT = {"BatchNormalization()"}


def cases(kind: str) -> list[tuple[str, str, str]]:
    """Inputs or outputs, an expression, and a reduction."""
    table = {"layers": LAYERS, "losses": LOSSES, "metrics": METRICS}[kind]
    there = vars(getattr(keras, kind))
    reductions = REDUCTIONS if kind == "losses" else REDUCTIONS[:1]
    return [
        (of, text, reduction)
        for of, texts in table.items()
        for text in texts
        if class_of(text) in there
        for reduction in reductions
    ]


def class_of(text: str) -> str:
    return text.partition("(")[0]


def classes(kind: str) -> dict[str, type]:
    """What the installed Keras exports, each class by its first name."""
    found = {name: c for name, c in vars(getattr(keras, kind)).items() if inspect.isclass(c)}
    return {next(n for n, other in found.items() if other is c): c for c in found.values()}


def unknown(kind: str) -> set[str]:
    """Classes that no case has."""
    texts = " ".join(text for _, text, _ in cases(kind))
    home = vars(getattr(keras, kind))
    known = {id(home.get(name)) for name in {*re.findall(r"\w+", texts), *NOT_TRIED}}
    return {name for name, c in classes(kind).items() if id(c) not in known}
