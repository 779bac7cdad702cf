"""Settings come from flags, then the environment; what makes no sense is named in one line."""

from __future__ import annotations

import pytest

from draftline_operator.main import build_parser, main
from draftline_operator.settings import Settings, SettingsError, load_settings


def test_every_setting_is_a_flag_with_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["run", "--help"])
    text = capsys.readouterr().out
    for name, field in Settings.model_fields.items():
        assert f"--{name.replace('_', '-')}" in text
        assert field.description


def test_flags_win_over_the_environment_and_both_over_defaults() -> None:
    environment = {"DRAFTLINE_OPERATOR_HEALTH_PORT": "9000", "DRAFTLINE_OPERATOR_LOG_LEVEL": "debug"}
    settings = load_settings({"health_port": "9001"}, environment)
    assert (settings.health_port, settings.log_level, settings.log_format) == (9001, "debug", "json")


def test_what_the_chart_writes_is_understood() -> None:
    environment = {
        "DRAFTLINE_OPERATOR_WATCH_NAMESPACES": "a, b",
        "DRAFTLINE_OPERATOR_ALLOW_HOST_PATH": "true",
        "DRAFTLINE_OPERATOR_NETWORK_POLICY": "false",
        "DRAFTLINE_OPERATOR_AUTOSCALING_PROVIDER": "keda",
        "DRAFTLINE_OPERATOR_SERVICE_MONITOR_LABELS": "release=prometheus,team=a=b",
    }
    settings = load_settings({}, environment)
    assert settings.watch_namespaces == ("a", "b")
    assert (settings.allow_host_path, settings.network_policy) == (True, False)
    assert settings.service_monitor_labels == {"release": "prometheus", "team": "a=b"}
    assert load_settings({}, {"DRAFTLINE_OPERATOR_WATCH_NAMESPACES": ""}).watch_namespaces == ()


def test_variables_of_others_with_our_prefix_do_not_matter() -> None:
    assert load_settings({}, {"DRAFTLINE_OPERATOR_SERVICE_HOST": "10.0.0.1"}) == load_settings({}, {})


@pytest.mark.parametrize(
    ("flags", "environment", "named"),
    [
        pytest.param(
            {}, {"DRAFTLINE_OPERATOR_HEALTH_PORT": "http"}, "DRAFTLINE_OPERATOR_HEALTH_PORT", id="word"
        ),
        pytest.param({"health_port": "70000"}, {}, "--health-port", id="port"),
        pytest.param({"service_monitor_labels": "release"}, {}, "--service-monitor-labels", id="no-label"),
        pytest.param({"log_level": "loud"}, {}, "--log-level", id="choice"),
        pytest.param({"metrics_api_service": "x"}, {}, "metrics_api_secret", id="half-a-metrics-api"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(
    flags: dict[str, str], environment: dict[str, str], named: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags, environment)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_line_says_so_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--health-port", "-1"]) == 2
    assert capsys.readouterr().err.startswith("error: --health-port: ")


def test_without_a_cluster_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--kubeconfig", "/nonexistent/kubeconfig", "--health-port", "0"]) == 1
    assert capsys.readouterr().err.startswith("error: no configuration of a cluster was found")
