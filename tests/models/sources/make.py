"""Models of scikit-learn and CatBoost as ONNX files, with the libraries' own answers.

    pip install scikit-learn skl2onnx catboost
    python make.py

Writes NAME.onnx and NAME.npz (the rows `x`, the answers `label` and `scores`) beside itself. The
files here are of scikit-learn 1.9, skl2onnx 1.20 and CatBoost 1.2.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from catboost import CatBoostClassifier
from skl2onnx import to_onnx
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import GradientBoostingClassifier, RandomForestClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    MinMaxScaler,
    Normalizer,
    OneHotEncoder,
    OrdinalEncoder,
    RobustScaler,
    StandardScaler,
)

HERE = Path(__file__).parent
draw = np.random.default_rng(1)
x = draw.normal(size=(300, 4)).astype("float32")
x[:, 3] = draw.integers(0, 4, 300)
y = np.digitize(x[:, 0] + x[:, 1] * x[:, 2], [-0.5, 0.5])
names = np.array(["b", "c", "light"])[y]
holes = np.where(draw.random(x.shape) < 0.1, np.nan, x).astype("float32")
whole = draw.integers(0, 4, (300, 3))

columns = ColumnTransformer([("n", StandardScaler(), [0, 1, 2]), ("c", OneHotEncoder(), [3])])
models = {
    "network": (make_pipeline(columns, MLPClassifier((6,), random_state=1)), x, names),
    "linear": (
        make_pipeline(SimpleImputer(), MinMaxScaler(), Normalizer(), LogisticRegression()),
        holes,
        y > 1,
    ),
    "forest": (
        make_pipeline(OrdinalEncoder(), RandomForestClassifier(3, max_depth=3, random_state=1)),
        whole,
        y,
    ),
    "boosted": (
        make_pipeline(RobustScaler(), GradientBoostingClassifier(n_estimators=3, max_depth=2)),
        x,
        y > 1,
    ),
}
for name, (model, rows, labels) in models.items():
    model.fit(rows, labels)
    (HERE / f"{name}.onnx").write_bytes(to_onnx(model, rows[:1]).SerializeToString())
    found = {"label": model.predict(rows[:50]), "scores": model.predict_proba(rows[:50])}
    np.savez_compressed(HERE / f"{name}.npz", x=rows[:50], **found)
model = CatBoostClassifier(iterations=4, depth=2, verbose=0, allow_writing_files=False)
model.fit(holes, y)
model.save_model(HERE / "catboost.onnx", format="onnx")
found = {"label": model.predict(holes[:50])[:, 0], "scores": model.predict_proba(holes[:50])}
np.savez_compressed(HERE / "catboost.npz", x=holes[:50], **found)
