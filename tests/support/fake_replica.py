"""A replica of the Serve application over fake services, which tests exchange without a new replica."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from fake_service import INFO, FakeService
from starlette.types import ASGIApp, Receive, Scope, Send

from mingc.deploy.options import DeployOptions
from mingc.deploy.ray_metrics import RayMetrics
from mingc.deploy.replica import BehindProxy, ModelReplica
from mingc.runtime.request import Service, ServiceInfo
from mingc.server.app import create_app
from mingc.server.options import ServeOptions


class FakeReplica(ModelReplica):
    """Serves a `FakeService` by the HTTP app of every replica."""

    async def open_service(self) -> Service:
        return FakeService(replace(INFO, model=f"fake of process {os.getpid()}"))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        async def current(scope: Scope, receive: Receive, send: Send) -> None:
            await BehindProxy(self._app)(scope, receive, send)

        return current

    async def exchange(self, info: ServiceInfo, ready: bool, options: ServeOptions) -> None:
        """Serve a new fake service from now on."""
        self.service = FakeService(info, ready=ready)
        self._app = create_app(self.service, options)
        self._metrics = RayMetrics(self._app.state.server.metrics, lambda: self.service.load)

    async def check_health(self) -> None:
        """Always healthy: a service that is not ready is what a test asked for."""

    async def recorded(self, name: str) -> Any:
        """An attribute of the fake service: `chats`, `speeches`, `ends`, `running`."""
        return getattr(self.service, name)


def fake_application(num_replicas: int = 1, *, affinity: bool = False) -> Any:
    """The application with fake replicas. Until `exchange`, the model's name has the process of the replica."""
    from mingc.deploy.ray import build_application

    options = DeployOptions(
        artifact="none",
        num_gpus=0,
        num_cpus=0.1,
        min_replicas=num_replicas,
        max_replicas=num_replicas,
        affinity=affinity,
    )
    return build_application(options, FakeReplica)
