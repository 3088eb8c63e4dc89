"""ContextBudget: what it allows, what it refuses and how it says so, and what it reads from verl."""

from __future__ import annotations

import builtins
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from ctxguard.budget import ContextBudget
from ctxguard.errors import BudgetError, ConfigurationError

WINDOWS = st.integers(min_value=2, max_value=2_000_000)


@st.composite
def budgets(draw: st.DrawFn) -> ContextBudget:
    window = draw(WINDOWS)
    response = draw(st.none() | st.integers(1, window - 1))
    prompt = draw(st.none() | st.integers(1, window - (response or 0)))
    return ContextBudget(window=window, max_prompt_tokens=prompt, max_response_tokens=response)


def refusal(**fields: Any) -> BudgetError:
    with pytest.raises(BudgetError) as caught:
        ContextBudget(**fields)
    return caught.value


class TestLimits:
    def test_without_limits_a_quarter_of_the_window_is_kept_for_the_response(self) -> None:
        budget = ContextBudget(window=8192)
        assert budget.response_reserve == 2048
        assert budget.prompt_limit() == 6144

    def test_the_default_reserve_is_4096_at_most_and_1_at_least(self) -> None:
        assert ContextBudget(window=131072).response_reserve == 4096
        assert ContextBudget(window=2).response_reserve == 1

    def test_the_budget_of_the_report_that_started_the_project(self) -> None:
        budget = ContextBudget(window=20480, max_prompt_tokens=12288, max_response_tokens=8192)
        assert budget.response_reserve == 8192
        assert budget.prompt_limit() == 12288

    def test_the_requests_own_output_limit_replaces_the_reserve(self) -> None:
        budget = ContextBudget(window=20480, max_response_tokens=8192)
        assert budget.prompt_limit(512) == 19968
        assert budget.prompt_limit(16384) == 4096

    def test_a_small_output_limit_does_not_lift_the_prompt_limit(self) -> None:
        assert ContextBudget(window=20480, max_prompt_tokens=12288).prompt_limit(1) == 12288

    @pytest.mark.parametrize("unlimited", [-1, 0, None])
    def test_an_output_limit_below_1_counts_as_none(self, unlimited: int | None) -> None:
        budget = ContextBudget(window=20480, max_response_tokens=8192)
        assert budget.reserve_for(unlimited) == 8192
        assert budget.prompt_limit(unlimited) == 12288

    def test_an_output_limit_as_large_as_the_window_leaves_no_room(self) -> None:
        assert ContextBudget(window=1024).prompt_limit(1024) == 0
        assert ContextBudget(window=1024).prompt_limit(102400) < 0

    @given(budgets(), st.none() | st.integers(-1, 100_000))
    def test_prompt_and_response_never_exceed_the_window(
        self, budget: ContextBudget, output_tokens: int | None
    ) -> None:
        assert budget.prompt_limit(output_tokens) + budget.reserve_for(output_tokens) <= budget.window

    @given(budgets())
    def test_every_valid_budget_has_room_for_a_prompt_and_a_response(self, budget: ContextBudget) -> None:
        assert budget.prompt_limit() >= 1
        assert budget.response_reserve >= 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            ({"window": 0}, "window=0 must be at least 2 tokens"),
            ({"window": -20480}, "window=-20480 must be at least 2 tokens"),
            ({"window": 1}, "window=1 must be at least 2 tokens"),
            ({"window": 100, "max_prompt_tokens": 0}, "max_prompt_tokens=0 must be at least 1"),
            (
                {"window": 100, "max_prompt_tokens": 101},
                "max_prompt_tokens=101 is 1 more than the window of 100",
            ),
            ({"window": 100, "max_response_tokens": 0}, "max_response_tokens=0 must be at least 1"),
            (
                {"window": 100, "max_response_tokens": 100},
                "max_response_tokens=100 leaves no room for a prompt",
            ),
            ({"window": 100, "high_mark": 0}, "high_mark=0.0 must be a share"),
            ({"window": 100, "high_mark": 1.01}, "high_mark=1.01 must be a share"),
            ({"window": 100, "high_mark": float("nan")}, "high_mark=nan must be a share"),
            ({"window": 100, "low_mark": 0}, "low_mark=0.0 must be more than 0"),
            ({"window": 100, "low_mark": 0.97}, "less than high_mark=0.97"),
            (
                {"window": 100, "high_mark": 0.5},
                "low_mark=0.6 must be more than 0 and less than high_mark=0.5",
            ),
        ],
    )
    def test_names_the_value_and_the_limit(self, fields: dict[str, Any], named: str) -> None:
        assert named in str(refusal(**fields))

    def test_says_by_how_much_prompt_and_response_exceed_the_window_and_what_to_change(self) -> None:
        error = refusal(window=16384, max_prompt_tokens=12288, max_response_tokens=8192)
        assert "make 20480, 4096 more than the window of 16384" in str(error)
        assert "lower max_prompt_tokens to 8192 or max_response_tokens by 4096" in str(error)

    def test_carries_its_facts_as_attributes_and_through_pickle(self) -> None:
        error = pickle.loads(pickle.dumps(refusal(window=100, max_prompt_tokens=150)))
        assert (error.field, error.value, error.limit) == ("max_prompt_tokens", 150, 100)
        assert isinstance(error, ConfigurationError)
        assert isinstance(error, ValueError)

    @pytest.mark.parametrize("value", [True, 20480.0, "20480", None])
    def test_takes_nothing_but_a_whole_number_for_a_window(self, value: object) -> None:
        error = refusal(window=value)
        assert str(error).startswith(f"window={value!r} must be a whole number of tokens")
        assert type(value).__name__ in str(error)

    @pytest.mark.parametrize("field", ["max_prompt_tokens", "max_response_tokens"])
    @pytest.mark.parametrize("value", [True, 512.0, "512"])
    def test_takes_nothing_but_a_whole_number_or_none_for_a_limit(self, field: str, value: object) -> None:
        assert f"{field}={value!r} must be a whole number of tokens (an int) or None" in str(
            refusal(window=20480, **{field: value})
        )

    def test_an_unknown_field_is_refused_with_the_nearest_known_one(self) -> None:
        assert "did you mean max_prompt_tokens?" in str(refusal(window=20480, max_promt_tokens=1))
        assert "it has window, max_prompt_tokens" in str(refusal(window=20480, colour="red"))

    def test_a_missing_window_is_named(self) -> None:
        assert "window is missing" in str(refusal())

    def test_every_complaint_about_types_is_told_at_once(self) -> None:
        message = str(refusal(window="a", high_mark="b"))
        assert "window='a'" in message
        assert "high_mark='b'" in message

    def test_validating_a_dict_raises_the_same_error(self) -> None:
        assert ContextBudget.model_validate({"window": 20480}) == ContextBudget(window=20480)
        with pytest.raises(BudgetError, match="window=0"):
            ContextBudget.model_validate({"window": 0})

    def test_inside_another_pydantic_model_it_is_that_models_validation_error(self) -> None:
        class Settings(BaseModel):
            budget: ContextBudget

        with pytest.raises(ValidationError, match="window=0 must be at least 2"):
            Settings(budget={"window": 0})  # type: ignore[arg-type]


class TestValue:
    def test_is_frozen_hashable_and_picklable(self) -> None:
        budget = ContextBudget(window=20480)
        with pytest.raises(ValidationError, match="frozen"):
            budget.window = 1
        assert pickle.loads(pickle.dumps(budget)) == budget
        assert len({budget, ContextBudget(window=20480)}) == 1

    def test_a_changed_copy_is_checked(self) -> None:
        budget = ContextBudget(window=20480)
        assert budget.model_copy(update={"high_mark": 0.9}).high_mark == 0.9
        with pytest.raises(BudgetError, match="high_mark=9"):
            budget.model_copy(update={"high_mark": 9.0})

    def test_says_where_its_window_comes_from(self) -> None:
        budget = ContextBudget(window=20480)
        assert budget.source == "explicit"
        assert budget.with_window(16384).source == "learnt"
        assert budget.with_window(16384, source="vllm /v1/models").source == "vllm /v1/models"

    def test_fields_are_described(self) -> None:
        properties = ContextBudget.model_json_schema()["properties"]
        assert all(properties[name].get("description") for name in properties)


class TestWithWindow:
    def test_a_larger_window_changes_nothing_else(self) -> None:
        budget = ContextBudget(window=20480, max_prompt_tokens=12288, max_response_tokens=8192)
        larger = budget.with_window(40960)
        assert (larger.max_prompt_tokens, larger.max_response_tokens) == (12288, 8192)

    def test_in_a_smaller_window_the_prompt_gives_way_first(self) -> None:
        budget = ContextBudget(window=20480, max_prompt_tokens=12288, max_response_tokens=8192)
        smaller = budget.with_window(18000)
        assert (smaller.max_prompt_tokens, smaller.max_response_tokens) == (9808, 8192)

    def test_the_response_keeps_half_of_a_much_smaller_window(self) -> None:
        budget = ContextBudget(window=20480, max_prompt_tokens=12288, max_response_tokens=8192)
        smaller = budget.with_window(4096)
        assert (smaller.max_prompt_tokens, smaller.max_response_tokens) == (2048, 2048)

    def test_a_response_beside_a_small_prompt_keeps_what_the_prompt_leaves(self) -> None:
        budget = ContextBudget(window=20480, max_prompt_tokens=2000, max_response_tokens=16000)
        smaller = budget.with_window(17000)
        assert (smaller.max_prompt_tokens, smaller.max_response_tokens) == (2000, 15000)

    @pytest.mark.parametrize("window", [1, 0, -5, True, 4096.0])
    def test_refuses_what_is_no_window(self, window: Any) -> None:
        with pytest.raises(BudgetError, match=f"window={window}"):
            ContextBudget(window=20480).with_window(window)

    @given(budgets(), WINDOWS)
    def test_is_valid_for_every_window_and_never_enlarges_a_limit(
        self, budget: ContextBudget, window: int
    ) -> None:
        other = budget.with_window(window)
        assert other.window == window
        assert other.prompt_limit() >= 1
        assert (other.high_mark, other.low_mark) == (budget.high_mark, budget.low_mark)
        for field in ("max_prompt_tokens", "max_response_tokens"):
            before, after = getattr(budget, field), getattr(other, field)
            assert (after is None) == (before is None)
            assert before is None or 1 <= after <= before

    @given(budgets(), st.integers(0, 1_000_000))
    def test_is_the_same_budget_in_the_same_or_a_larger_window(
        self, budget: ContextBudget, more: int
    ) -> None:
        other = budget.with_window(budget.window + more, source=budget.source)
        assert other == budget.model_copy(update={"window": budget.window + more})


def verl(
    prompt: Any = 12288, response: Any = 8192, *, rollout: dict[str, Any] | None = None, **data: Any
) -> dict[str, Any]:
    """A verl configuration in the shape that a training script passes on."""
    return {
        "data": {"max_prompt_length": prompt, "max_response_length": response, "truncation": "error", **data},
        "actor_rollout_ref": {
            "model": {"path": "some/model"},
            "rollout": {
                "name": "vllm",
                "multi_turn": {"enable": True, "format": "hermes", "max_assistant_turns": 8},
                **(rollout or {}),
            },
        },
    }


# As verl's own rollout.yaml has them.
INTERPOLATED = {
    "prompt_length": "${oc.select:data.max_prompt_length,512}",
    "response_length": "${oc.select:data.max_response_length,512}",
    "max_model_len": None,
}


def verl_refusal(config: Any, **options: Any) -> str:
    with pytest.raises(BudgetError) as caught:
        ContextBudget.from_verl(config, **options)
    return str(caught.value)


class TestFromVerl:
    def test_the_window_is_prompt_plus_response_as_verl_serves_it(self) -> None:
        budget = ContextBudget.from_verl(verl())
        assert budget == ContextBudget(
            window=20480, max_prompt_tokens=12288, max_response_tokens=8192, source="verl"
        )

    @pytest.mark.parametrize("unset", [None, 0, "???"])
    def test_a_max_model_len_that_is_not_set_is_none(self, unset: object) -> None:
        assert ContextBudget.from_verl(verl(rollout={"max_model_len": unset})).window == 20480

    def test_max_model_len_is_the_window_where_it_is_set(self) -> None:
        budget = ContextBudget.from_verl(verl(rollout={"max_model_len": 32768}))
        assert (budget.window, budget.prompt_limit()) == (32768, 12288)

    def test_what_is_passed_to_vllm_directly_is_the_window(self) -> None:
        engine = {"engine_kwargs": {"vllm": {"max_model_len": 24576}}}
        assert ContextBudget.from_verl(verl(rollout=engine)).window == 24576

    def test_a_window_that_is_passed_wins_over_the_configuration(self) -> None:
        budget = ContextBudget.from_verl(verl(rollout={"max_model_len": 32768}), window=24000)
        assert (budget.window, budget.source) == (24000, "explicit")

    def test_the_rollout_section_alone_is_enough(self) -> None:
        lengths = {"prompt_length": 1000, "response_length": 500, "max_model_len": 2000}
        expected = ContextBudget(window=2000, max_prompt_tokens=1000, max_response_tokens=500, source="verl")
        assert ContextBudget.from_verl({"actor_rollout_ref": {"rollout": lengths}}) == expected
        assert ContextBudget.from_verl({"rollout": lengths}) == expected
        assert ContextBudget.from_verl(lengths) == expected

    @pytest.mark.parametrize("truncation", ["error", "left", "right", "middle"])
    def test_truncation_of_the_data_set_does_not_change_the_budget(self, truncation: str) -> None:
        assert ContextBudget.from_verl(verl(truncation=truncation)) == ContextBudget.from_verl(verl())

    def test_limits_in_characters_and_turns_do_not_change_the_budget(self) -> None:
        multi_turn = {"multi_turn": {"max_tool_response_length": 256, "max_user_turns": 4}}
        assert ContextBudget.from_verl(verl(rollout=multi_turn)) == ContextBudget.from_verl(verl())

    def test_the_configuration_is_not_changed(self) -> None:
        config = verl(rollout={"max_model_len": None})
        before = pickle.dumps(config)
        ContextBudget.from_verl(config)
        assert pickle.dumps(config) == before


class TestFromVerlRefuses:
    def test_lengths_that_do_not_fit_the_window_and_names_all_numbers(self) -> None:
        message = verl_refusal(verl(rollout={"max_model_len": 16384}))
        assert "data.max_prompt_length 12288 + data.max_response_length 8192 = 20480, 4096 more" in message
        assert "actor_rollout_ref.rollout.max_model_len 16384" in message

    def test_lengths_that_do_not_fit_the_window_that_was_passed(self) -> None:
        assert "the window passed here, 16384" in verl_refusal(verl(), window=16384)

    def test_two_prompt_lengths_that_differ(self) -> None:
        message = verl_refusal(verl(rollout={"prompt_length": 4096}))
        assert "data.max_prompt_length is 12288" in message
        assert "actor_rollout_ref.rollout.prompt_length is 4096" in message

    def test_two_windows_that_differ(self) -> None:
        rollout = {"max_model_len": 32768, "engine_kwargs": {"vllm": {"max_model_len": 24576}}}
        assert "engine_kwargs.vllm.max_model_len is 24576" in verl_refusal(verl(rollout=rollout))

    @pytest.mark.parametrize(
        "config", [{}, {"data": {}}, {"data": None}, {"data": {"max_response_length": 1}}]
    )
    def test_missing_keys_and_names_those_looked_for(self, config: dict[str, Any]) -> None:
        message = verl_refusal(config)
        assert "data.max_prompt_length, actor_rollout_ref.rollout.prompt_length" in message

    def test_a_missing_response_length(self) -> None:
        assert "data.max_response_length" in verl_refusal({"data": {"max_prompt_length": 12288}})

    @pytest.mark.parametrize("value", ["12288", 12288.0, True, [12288]])
    def test_a_length_that_is_no_whole_number_and_names_its_key(self, value: object) -> None:
        message = verl_refusal(verl(prompt=value))
        assert message.startswith(f"data.max_prompt_length is {value!r}")

    @pytest.mark.parametrize("value", [0, -1])
    def test_a_length_below_1(self, value: int) -> None:
        assert "data.max_response_length is" in verl_refusal(verl(response=value))

    def test_a_window_below_0(self) -> None:
        assert "max_model_len is -1" in verl_refusal(verl(rollout={"max_model_len": -1}))

    @pytest.mark.parametrize("config", [None, 20480, ["data"]])
    def test_what_is_no_configuration(self, config: object) -> None:
        assert "must be a mapping, an OmegaConf object or the path of a YAML file" in verl_refusal(config)


class TestFromVerlWithOmegaConf:
    @pytest.fixture(autouse=True)
    def _needs_omegaconf(self) -> None:
        pytest.importorskip("omegaconf")

    def test_a_composed_configuration_is_read_with_its_interpolations(self) -> None:
        from omegaconf import OmegaConf

        config = OmegaConf.create(verl(rollout=dict(INTERPOLATED)))
        assert ContextBudget.from_verl(config) == ContextBudget.from_verl(verl())

    def test_a_section_of_it_is_read_too(self) -> None:
        from omegaconf import OmegaConf

        config = OmegaConf.create(verl(rollout=dict(INTERPOLATED)))
        assert ContextBudget.from_verl(config.actor_rollout_ref).window == 20480
        assert ContextBudget.from_verl(config.actor_rollout_ref.rollout).window == 20480

    def test_a_struct_without_the_optional_keys_is_read(self) -> None:
        from omegaconf import OmegaConf

        config = OmegaConf.create({"data": {"max_prompt_length": 100, "max_response_length": 50}})
        OmegaConf.set_struct(config, True)
        OmegaConf.set_readonly(config, True)
        assert ContextBudget.from_verl(config).window == 150

    def test_a_mandatory_value_that_was_not_given_is_missing(self) -> None:
        from omegaconf import OmegaConf

        assert "has none of data.max_prompt_length" in verl_refusal(OmegaConf.create(verl(prompt="???")))

    def test_an_interpolation_in_a_plain_dict_is_resolved(self) -> None:
        assert ContextBudget.from_verl(verl(rollout=dict(INTERPOLATED))).window == 20480
        window = {"max_model_len": "${data.max_prompt_length}"}
        assert "max_model_len 12288" in verl_refusal(verl(rollout=window))

    def test_a_whole_section_may_be_an_interpolation(self) -> None:
        assert ContextBudget.from_verl({"data": "${base}", "base": verl()["data"]}).window == 20480

    @pytest.mark.parametrize(
        "value", ["${nowhere.at.all}", "${no_such_resolver:1}", "${data.max_prompt_length}"]
    )
    def test_an_interpolation_that_leads_nowhere_is_named(self, value: str) -> None:
        assert verl_refusal(verl(prompt=value)).startswith("data.max_prompt_length")

    def test_an_unresolvable_interpolation_elsewhere_does_not_matter(self) -> None:
        config = verl(rollout=dict(INTERPOLATED), train_files="${hydra:runtime.cwd}/train.parquet")
        assert ContextBudget.from_verl(config).window == 20480


class TestFromVerlFile:
    def write(self, folder: Path, text: str) -> Path:
        file = folder / "agent.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    @pytest.mark.parametrize("kind", [str, Path])
    def test_a_hydra_file_is_read(self, tmp_path: Path, kind: type) -> None:
        pytest.importorskip("omegaconf")
        file = self.write(
            tmp_path,
            """
            hydra: {searchpath: ["file://verl/trainer/config"]}
            defaults: [ppo_trainer, _self_]
            data:
              train_files: ${oc.env:NOT_SET_ANYWHERE}
              max_prompt_length: 12288
              max_response_length: 8192
            actor_rollout_ref:
              rollout:
                prompt_length: ${data.max_prompt_length}
                max_model_len: null
            """,
        )
        assert ContextBudget.from_verl(kind(file)) == ContextBudget.from_verl(verl())

    def test_what_hydra_defaults_would_bring_is_said_to_be_missing(self, tmp_path: Path) -> None:
        pytest.importorskip("yaml")
        file = self.write(tmp_path, "defaults: [ppo_trainer]\ndata: {max_prompt_length: 12288}\n")
        message = verl_refusal(file)
        assert "agent.yaml has none of data.max_response_length" in message
        assert "'defaults'" in message

    @pytest.mark.parametrize("text", ["a: [", "- just\n- a list\n", "", "text"])
    def test_a_file_that_holds_no_configuration_is_refused(self, tmp_path: Path, text: str) -> None:
        pytest.importorskip("yaml")
        assert "agent.yaml" in verl_refusal(self.write(tmp_path, text))

    def test_a_file_that_is_not_there_is_refused(self, tmp_path: Path) -> None:
        assert "cannot be read" in verl_refusal(tmp_path / "nowhere.yaml")


class TestWithoutOptionalPackages:
    @pytest.fixture(autouse=True)
    def _neither_is_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = builtins.__import__

        def refuse(name: str, *rest: Any) -> Any:
            if name.split(".")[0] in {"omegaconf", "yaml"}:
                raise ImportError(name)
            return real(name, *rest)

        monkeypatch.setattr(builtins, "__import__", refuse)

    def test_a_plain_dict_needs_neither(self) -> None:
        assert ContextBudget.from_verl(verl()).window == 20480

    def test_an_interpolation_is_refused_with_its_key_and_the_remedy(self) -> None:
        message = verl_refusal(verl(rollout=dict(INTERPOLATED)))
        assert message.startswith("actor_rollout_ref.rollout.prompt_length is the interpolation")
        assert "ctxguard-sdk[verl]" in message

    def test_a_file_is_refused_with_the_remedy(self, tmp_path: Path) -> None:
        file = tmp_path / "agent.yaml"
        file.write_text("data: {}", encoding="utf-8")
        assert "needs PyYAML" in verl_refusal(file)
