"""Independent references: float64 and Python integers, one row and one token at a time."""

import math

import torch

DRAFT, ACCEPT, RESAMPLE = 0, 1, 2
INF = math.inf


def philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b % 2**32, (a >> 32) ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def uniform(seed: int, step: int, offset: int, stream: int, index: int) -> float:
    counter = [index // 4, offset % 2**32, step % 2**32, stream]
    word = philox(counter, [seed % 2**32, seed // 2**32 % 2**32])[index % 4]
    return min((word + 0.5) * 2.0**-32, 1 - 2.0**-24)


def race(weights: list[float], seed: int, step: int, offset: int, stream: int) -> int:
    best, winner = -1.0, -1
    for v, weight in enumerate(weights):
        score = weight / -math.log1p(-uniform(seed, step, offset, stream, v))
        if score > best:
            best, winner = score, v
    return winner


def softmax(row: torch.Tensor, temperature: float = 1.0, threshold: float = -INF) -> list[float]:
    """Probabilities of one row; temperature 0 counts as 1."""
    x = row.tolist()
    largest = max(x)
    e = [math.exp((v - largest) / (temperature or 1.0)) if v >= threshold else 0.0 for v in x]
    total = math.fsum(e)
    return [v / total for v in e]


def kl(p: list[float], q: list[float]) -> float:
    q = (q + [0.0] * len(p))[: len(p)]
    return math.fsum(a * (math.log(a) - math.log(b if b > 0 else 1e-8)) for a, b in zip(p, q, strict=True) if a > 0)


def broken(row: torch.Tensor) -> bool:
    return bool(row.isnan().any()) or not math.isfinite(max(row.tolist()))


def argmax(row: torch.Tensor) -> int:
    x = row.tolist()
    return x.index(max(x))


def verify(target, draft, tokens, cu, temperature, seed, step, max_draft, t_threshold=None, d_threshold=None):
    """All of `Verification` as lists, on finite logits."""
    tokens, cu, seed, step = tokens.tolist(), cu.tolist(), seed.tolist(), step.tolist()
    vocabulary = target.shape[1]
    out: dict[str, list] = {"tokens": [], "num_accepted": [], "kld": [], "accept_prob": [], "logprobs": []}
    for i, t in enumerate(temperature.tolist()):
        emitted, logs, stopped = [], [], False
        residual, accepted = None, 0
        for j in range(cu[i + 1] - cu[i]):
            r, row = cu[i] + j, target[cu[i] + i + j]
            x = tokens[r]
            known = 0 <= x < vocabulary
            p1 = softmax(row, t)
            p = softmax(row, t, t_threshold[cu[i] + i + j] if t_threshold is not None and t > 0 else -INF)
            if draft is None:
                out["kld"].append(-math.log(p1[x]) if known and p1[x] > 0 else -math.log(1e-8))
                q = [float(v == x) for v in range(vocabulary)]
            else:
                shared = draft[r, :vocabulary]
                out["kld"].append(kl(p1, softmax(shared, t)))
                q = softmax(shared, t, d_threshold[r] if d_threshold is not None and t > 0 else -INF)
                q += [0.0] * (vocabulary - len(q))
            if not known:
                ratio = 0.0
            elif t == 0:
                ratio = float(x == argmax(row))
            else:
                ratio = 0.0 if p[x] == 0 else 1.0 if q[x] == 0 else min(1.0, p[x] / q[x])
            out["accept_prob"].append(ratio)
            passes = ratio == 1.0 if t == 0 else uniform(seed[i], step[i], j, ACCEPT, 0) < ratio
            if not stopped and passes:
                emitted.append(x)
                logs.append(math.log(p[x]))
                accepted += 1
            elif not stopped:
                stopped = True
                if known:
                    residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        final = target[cu[i] + i + accepted]
        p = softmax(final, t, t_threshold[cu[i] + i + accepted] if t_threshold is not None and t > 0 else -INF)
        weights = residual if residual is not None and max(residual) > 0 else p
        last = argmax(final) if t == 0 else race(weights, seed[i], step[i], accepted, RESAMPLE)
        emitted.append(last)
        logs.append(math.log(p[last]))
        out["num_accepted"].append(accepted)
        out["tokens"].append(emitted + [-1] * (max_draft + 1 - len(emitted)))
        out["logprobs"].append(logs + [0.0] * (max_draft + 1 - len(logs)))
    return out


def threshold(row: torch.Tensor, temperature: float, k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> float:
    """Smallest kept logit, or -inf where all are kept."""
    x = sorted(row.tolist(), reverse=True)
    if temperature == 0:
        return -INF
    kept = [v for v in x if v >= x[k - 1]] if 0 < k < len(x) else list(x)
    if top_p < 1:
        p = [math.exp((v - x[0]) / temperature) for v in kept]
        total, mass, n = math.fsum(p), 0.0, 0
        while mass < top_p * total and n < len(kept):
            mass, n = mass + p[n], n + 1
        kept = [v for v in kept if v >= kept[n - 1]]
    kept = [v for v in kept if math.exp((v - x[0]) / temperature) >= min_p]
    return -INF if len(kept) == len(x) else kept[-1]


class Rule:
    """One sequence under the DSDE rule, in plain Python."""

    def __init__(self, rule):
        self.rule, self.history, self.drafted = rule, [], 0
        self.values, self.most_accepted = [], 0  # of the calibration phase
        self.sl, self.sl_max, self.wvir, self.mu, self.exact = rule.sl_start, rule.sl_limit, 0.0, 0.0, 0.0

    @property
    def calibrated(self) -> bool:
        return self.drafted >= self.rule.calibration_tokens

    def variance(self, values: list[float]) -> float:
        weights = [self.rule.decay**age for age in range(len(values))][::-1]
        mean = sum(w * x for w, x in zip(weights, values, strict=True)) / sum(weights)
        return sum(w * (x - mean) ** 2 for w, x in zip(weights, values, strict=True)) / sum(weights)

    def step(self, kld: list[float], accepted: int, temperature: float = 0.0) -> None:
        rule = self.rule
        if not kld:
            return
        in_calibration = not self.calibrated
        self.history = (self.history + kld)[-rule.long_window :]
        self.drafted += len(kld)
        self.mu = sum(kld) / len(kld)
        if in_calibration:
            self.values += kld
            self.most_accepted = max(self.most_accepted, accepted)
        long = self.variance(self.history)
        self.wvir = 20.0 if long < 1e-6 else self.variance(self.history[-rule.short_window :]) / long
        if len(self.history) < 2:
            self.wvir = 0.0
        if not self.calibrated:
            self.sl = min(2 * self.sl, rule.sl_limit) if accepted == len(kld) else self.sl
            return
        if in_calibration:
            mean = sum(self.values) / len(self.values)
            raw = self.most_accepted * (1 + rule.sl_max_coefficient * mean / (max(self.values) + 1e-6))
            self.sl_max = min(max(math.floor(raw + 0.5), rule.sl_min), rule.sl_limit)
        low = max(rule.sl_min, math.ceil(rule.sl_min_fraction * self.sl_max))
        mu = self.mu / temperature if rule.divide_by_temperature and temperature > 0 else self.mu
        x = (math.exp(rule.alpha * mu) - 1) * self.wvir
        self.exact = low + (1 - x) * (self.sl_max - low) if x <= 1 else low
        self.sl = max(math.ceil(self.exact), low)


def cap(rule, sequences: list[Rule], proposed: list[bool]) -> tuple[list[int], float]:
    votes = [s.sl for s, took_part in zip(sequences, proposed, strict=True) if took_part and s.calibrated]
    if rule.cap is None or not votes:
        return [s.sl for s in sequences], INF
    mean = sum(votes) / len(votes)
    limit = {"nearest": math.floor(mean + 0.5), "floor": math.floor(mean), "ceil": math.ceil(mean)}[rule.cap]
    return [min(s.sl, limit) if s.calibrated else s.sl for s in sequences], limit
