// The same in another language, without any SDK: an agent needs a base URL, a key, and one call for the reward.
//
//   BASE_URL=http://127.0.0.1:8080/v1 API_KEY=tf-… node examples/curl/agent.mjs
//
// Base URL and key come from whoever started the rollout: see rollout.sh, or turnfold.agents.GatewayClient.
const { BASE_URL, API_KEY } = process.env;

async function post(path, body) {
  const response = await fetch(`${BASE_URL}${path}`, {
    method: "POST",
    headers: { "content-type": "application/json", authorization: `Bearer ${API_KEY}` },
    body: JSON.stringify(body),
  });
  const answer = await response.json();
  if (!response.ok) throw new Error(`${path}: ${response.status} ${answer.error?.message}`);
  return answer;
}

const completion = await post("/chat/completions", {
  model: "policy",
  max_tokens: 48,
  messages: [{ role: "user", content: "open door 3" }],
});
const text = completion.choices[0].message.content ?? "";
const outcome = await post("/rollouts/current/finish", { reward: text.includes("5") ? 1.0 : 0.0 });
console.log(JSON.stringify(outcome));
