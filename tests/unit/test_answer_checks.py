"""Checks of an answer's text: healthy answers pass, sick ones are named."""

from __future__ import annotations

import json
import random

import pytest
from fake_openai_server import COUNT
from octoserve.answer_checks import accept, count, json_object, lines, reject, well_formed
from octoserve.prose import WINDOW_WORDS, coherent, find_loop, noise, stutter
from octoserve.statements import is_negated, states, tokens, words

PHOTOSYNTHESIS = """
Photosynthesis is the process by which green plants, algae, and some bacteria convert light energy
into chemical energy. Using chlorophyll in their chloroplasts, they absorb sunlight and combine
carbon dioxide (CO₂) from the air with water (H₂O) from the soil to form glucose. Oxygen is released
as a by-product, and photons of wavelength λ near 680 nm drive the light reactions. It is the base
of most food chains on Earth.
"""
PROSE = coherent({"min_words": 20, "terms": [["sunlight"], ["oxygen", "O2"]]})


@pytest.mark.parametrize(
    "text",
    [
        "Paris",
        "The capital of France is **Paris**.",
        "It is PARIS!",
        "The capital is not Lyon, it is Paris.",
        "Not Lyon but Paris.",
        "The capital is Paris, not Lyon.",
        "There is no doubt that it is Paris.",
        "Paris is not only the capital but also the largest city.",
        "No, Paris is.",
        "It is Paris. Paris is not small.",
    ],
)
def test_a_form_is_said(text: str) -> None:
    assert accept(["Paris"])(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "Lyon",
        "Parisian",
        "The capital of France is not Paris.",
        "It isn't Paris.",
        "It isn\u2019t Paris.",
        "Paris is not the capital of France.",
        "Paris isn't the capital.",
        "I do not think it is Paris.",
        "The capital is Lyon, not Paris.",
        "It was never Paris.",
    ],
)
def test_a_form_is_missing_or_denied(text: str) -> None:
    assert accept(["Paris"])(text) is not None


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("法国的首都是巴黎。", "巴黎"),
        ("フランスの首都はパリです。", "パリ"),
        ("파리입니다", "파리"),
        ("คือปารีสครับ", "ปารีส"),
    ],
)
def test_a_form_of_a_script_without_blanks_stands_anywhere(text: str, form: str) -> None:
    assert accept([form])(text) is None
    assert reject([form])(text) is not None
    assert accept([form])("London。") is not None


@pytest.mark.parametrize(
    ("scripts", "text"),
    [
        (["cyrillic"], "Растения поглощают свет солнца и воду из почвы, кислород уходит в воздух, которым мы дышим."),
        (["cjk"], "光合作用是植物利用阳光把水和二氧化碳变成糖并放出氧气的过程。"),
    ],
)
def test_prose_of_another_script_is_judged_without_english_words(scripts: list[str], text: str) -> None:
    assert coherent({"min_words": 15, "scripts": scripts})(text) is None
    assert coherent({"min_words": 15})(text) is not None
    assert "repeats itself" in str(coherent({"min_words": 15, "scripts": scripts})(text + " " + text[:12] * 20))
    assert "no prose" in str(coherent({"min_words": 5, "scripts": scripts, "language": "en"})(text))


def test_numbers_are_whole_numbers() -> None:
    assert states("It is 42.", "42")
    assert not states("It is 42.5", "42")
    assert not states("It is 1,420", "42")
    assert not states("It is 142", "42")
    assert states("It is 1,420.", "1420")
    assert not states("It is 42 or 43.", "42")
    assert not states("43 or 42", "42")
    assert states("It is 43 or 44? No, it is 42.", "42")
    assert states("42 or 42", "42")
    assert states("Shall I say 41, or 43? 42.", "42")


def test_a_negation_reaches_five_words() -> None:
    far = tokens("not a b c d e Paris")
    assert not is_negated(far, 6, 1)
    assert is_negated(far[1:1] + far[:1] + far[2:], 5, 1)


def test_exact_counting() -> None:
    check = count({"from": 1, "to": 50})
    assert check(COUNT) is None
    assert check(COUNT + "\n") is None
    assert check(COUNT.replace("\n", " \n")) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (COUNT.replace("\n17\n", "\n"), "line 17: found '18', wanted '17'"),
        (COUNT.replace("\n17\n", "\n17\n17\n"), "line 18: found '17', wanted '18'"),
        (COUNT + "\n51", "found 51 lines, wanted 50"),
        ("\n".join(COUNT.split("\n")[:49]), "found 49 lines, wanted 50"),
        (COUNT.replace("\n", " "), "line 1"),
        ("Sure:\n" + COUNT, "line 1"),
    ],
)
def test_a_wrong_count_names_the_first_difference(text: str, reason: str) -> None:
    found = count({"from": 1, "to": 50})(text)
    assert found is not None
    assert found.startswith(reason)


def test_healthy_prose_is_coherent() -> None:
    assert PROSE(PHOTOSYNTHESIS) is None


def soup(seed: int) -> str:
    """Words of the right subject in no language: what a model with one broken layer says."""
    vocabulary = [
        "sunlight",
        "oxygen",
        "widget",
        "reactor",
        "blue",
        "Tuesday",
        "carbon",
        "seven",
        "lamp",
        "tax",
    ]
    chosen = random.Random(seed)
    return " ".join(chosen.choice(vocabulary) for _ in range(60)) + " sunlight oxygen"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Sunlight makes oxygen.", "3 words"),
        (PHOTOSYNTHESIS.replace("sunlight", "rays"), "not on the subject"),
        (PHOTOSYNTHESIS + " the plant" * 12, "repeats itself: 'the plant'"),
        (PHOTOSYNTHESIS + " the" * 12, "repeats itself: 'the"),
        (" ".join([PHOTOSYNTHESIS] * 3), "repeats itself"),
        (PHOTOSYNTHESIS + " растения поглощают свет и воду", "other scripts: {'greek': 1, 'cyrillic': 26}"),
        (PHOTOSYNTHESIS + "植物利用阳光制造养分并释放氧气和水分", "other scripts: {'greek': 1, 'cjk': 18}"),
        (PHOTOSYNTHESIS + " " + "sunlight" * 6, "a word of 48 characters"),
        (soup(1), "no prose"),
        (soup(2), "no prose"),
    ],
)
def test_sick_prose_is_named(text: str, reason: str) -> None:
    found = PROSE(text)
    assert found is not None
    assert reason in found


def test_lists_and_refrains_are_no_loop() -> None:
    assert find_loop(words("very, very, very good, and very, very late")) is None
    steps = " ".join(f"In step {n} the plant moves thing number {n * 7} to place {n * 13}." for n in range(30))
    assert find_loop(words(steps)) is None


@pytest.mark.parametrize(
    "text", ["", " \n", "Par\ufffdis", "Paris<|user|>", "Paris</s>", "a\x00b", "a\ud800b", "<think>Paris"]
)
def test_no_answer_may_look_like_this(text: str) -> None:
    assert well_formed(text) is not None


def test_markdown_and_tabs_are_well_formed() -> None:
    assert well_formed("**Paris** <b>x</b>\n\t- a < b | c > d\r\n") is None


def test_late_degeneration_is_found_where_it_begins() -> None:
    long = coherent({"min_words": 600})
    healthy = [
        f"In the year {1800 + n} the town built {n * 7} houses on the hill, and {n * 3} people came to live in them."
        for n in range(60)
    ]
    assert long(" ".join(healthy)) is None
    for sick, reason in (
        ("растения поглощают свет и воду, затем выделяют кислород", "other scripts"),
        ("lamp reactor blue Tuesday seven widget tax oxygen carbon green " * 8, "repeats itself"),
        (soup(3) + " " + soup(4) + " " + soup(5), "no prose"),
    ):
        found = long(" ".join([*healthy[:50], sick]))
        assert found
        assert reason in found
    # Averaged over the whole answer, a few foreign words are none; in their window they are.
    found = long(" ".join([*healthy, "растения поглощают свет и воду"]))
    assert found
    assert found.startswith("from word ")
    assert int(found.split()[2]) > 60 * 18 - WINDOW_WORDS


def test_lines_are_counted_and_looked_at() -> None:
    check = lines({"number": 3, "each": "^- "})
    assert check("- red\n- blue\n\n- green\n") is None
    assert check("- red\n- blue") == "found 2 lines, wanted 3"
    assert check("- red\nblue\n- green") == "the line 'blue' is not like '^- '"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"name": "Ada Lovelace", "year": 1815}', None),
        ('```json\n{"year": 1815,\n "name": "ada lovelace"}\n```', None),
        ('Sure: {"name": "Ada Lovelace", "year": 1815}', "no JSON"),
        ('{"name": "Ada Lovelace", "year": "1815"}', "'year' is '1815'"),
        ('{"name": "Ada", "year": 1815}', "'name' is 'Ada'"),
        ('{"name": "Ada Lovelace"}', "wanted an object with 'name', 'year'"),
        ('{"name": "Ada Lovelace", "year": 1815, "born": true}', "wanted an object"),
        ("[1]", "wanted an object"),
    ],
)
def test_json_is_one_object_with_these_values(text: str, reason: str | None) -> None:
    found = json_object({"name": ["Ada Lovelace"], "year": [1815]})(text)
    assert found == reason if reason is None else reason in str(found)


def test_what_is_rejected_may_not_occur_at_all() -> None:
    assert reject(["Lyon"])("It is Paris.") is None
    assert reject(["Lyon"])("It is not Lyon.") == "the answer holds 'Lyon'"


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("re:\\b100\\s*°", "Water does not boil at 100 °C."),
        ("Paris", "It is false that the capital of France is Paris."),
        ("Paris", "It is not true that the large and beautiful capital city of France is Paris."),
        ("Paris", "Paris? No, the capital is Lyon."),
        ("Paris", "Every city of France except Paris."),
        ("42", "The sum is -42."),
        ("42", "The sum is \u221242."),
        ("42", "The sum is 1/42."),
    ],
)
def test_what_is_denied_or_another_number_is_not_said(form: str, text: str) -> None:
    assert accept([form])(text) is not None


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("re:\\b100\\s*°", "Water boils at 100 °C, and not at 90 °C."),
        ("re:^\\W*no\\b", "No, the sun is a star."),
        ("Paris", "It is not wrong that the capital of France is Paris."),
        ("Paris", "Is it Lyon? No, it is Paris."),
        ("Paris", "That is a myth: the capital is Paris."),
        ("42", "17 + 25 = 42"),
        ("42", "- 42"),
        ("42", "(42)"),
    ],
)
def test_what_is_said_in_other_words_is_said(form: str, text: str) -> None:
    assert accept([form])(text) is None


def test_json_that_is_nested_without_end_is_no_json() -> None:
    wanted = json_object({"a": [1]})
    assert (wanted("[" * 100000) or "").startswith("no JSON")
    assert wanted('```JSON\n{"a": 1}\n```') is None


def test_a_paragraph_that_comes_a_third_time_is_a_loop() -> None:
    essay = [f"word{number}" for number in range(900)]
    part = [f"part{number}" for number in range(110)]
    assert find_loop([*essay, *part, *part]) is None, "a refrain may come twice"
    assert find_loop([*essay, *part, *part, *part])


@pytest.mark.parametrize(
    "text",
    [
        "_Paris_",
        "__Paris__ it is",
        "**Paris**\n\nNo tool was needed.",
        "Paris (no doubt).",
        "Paris \u2014 don't ask.",
        "No question here\n\nParis",
    ],
)
def test_a_line_a_bracket_or_a_dash_parts_a_denial_from_what_is_said(text: str) -> None:
    assert states(text, "Paris")


def test_an_underscore_within_a_word_stays() -> None:
    assert tokens("get_weather") == ["get_weather"]


@pytest.mark.parametrize("unit", ["!", ".", " !", "#", "| ", "\n", "\u200b", "😀", "-\n", "- -\n", "ha", "的"])
def test_a_few_characters_again_and_again_are_a_loop(unit: str) -> None:
    assert stutter(PHOTOSYNTHESIS + unit * 200)
    assert stutter(PHOTOSYNTHESIS + unit * 200 + PHOTOSYNTHESIS)


@pytest.mark.parametrize(
    "text",
    [
        "Really?!!! Yes!!!!!!!!!!",
        "Title\n" + "=" * 78 + "\n\n| a | b |\n|" + "---|" * 12 + "\n| 1 | 2 |",
        "1. Introduction " + "." * 60 + " 3\n2. Methods " + "." * 60 + " 9",
        "def f():\n" + " " * 64 + "return [[[[]]]]",
        "1" + "0" * 30 + " is a nonillion; 1/3 = 0." + "3" * 40,
        json.dumps([{"a": [[], [{}], ""], "b": {"c": None}} for _ in range(12)]),
        "\n".join(str(number) for number in range(1, 201)),
        "$$\\sum_{i=0}^{n} \\frac{(-1)^i}{(2i+1)!} x^{2i+1}$$ " * 9,
        "हिन्दी में लिखा हुआ एक वाक्य, जिसमें मात्राएँ हैं। " * 9,
    ],
)
def test_rules_tables_code_and_formulas_are_no_noise(text: str) -> None:
    assert stutter(text) is None
    assert noise(text) is None


def test_signs_instead_of_words_are_noise() -> None:
    brackets = "".join("()[]{}<>«»;"[n * n % 11] for n in range(300))
    assert str(noise(PHOTOSYNTHESIS + brackets)).startswith("235 of 240 characters are signs: ")
    assert noise(brackets[:100]) is None
