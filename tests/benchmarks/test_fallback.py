from __future__ import annotations

from benchmarks.serving import fallback
from benchmarks.subject import subject
from runtime.session.session import Origin
from serving.site.options import SitePolicy
from serving.site.place import Place
from serving.site.router import Router
from serving.site.site_session import SiteSession


def test_fall_back_against_a_local_session() -> None:
    made = subject(features=3, highest=100)
    direct = made.session("exported")
    away = Place("away", direct.executable, state="bad", reason="away")
    router = Router("mlp/1", [away], direct.executable, SitePolicy())
    falling = SiteSession(made.signature, router, Origin("mlp", "1", None, "site", "away"))
    panel = fallback.measure(direct, falling, made.inputs, (1, 33), 0.01)
    assert panel.columns == (1, 33) and len(panel.rows) == 4
    assert all(cell and cell.value > 0 for cells in panel.rows.values() for cell in cells)
    report = falling.report()
    assert report.fell_back > 4 and report.places[0].answered == 0
