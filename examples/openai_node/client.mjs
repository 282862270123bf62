// An agent with OpenAI's official client for Node, served by `rft serve`; its answers are rated and committed.
//   node client.mjs http://127.0.0.1:8010 "What is 12*7?"
import OpenAI from "openai";

const [url, question] = process.argv.slice(2);
const key = process.env.RFT_API_KEY ?? "none";
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key });
const messages = [{ role: "user", content: question }];

const { data: answer, response } = await client.chat.completions
  .create({ model: "policy", messages }, { headers: { "x-rft-conversation": "node-1" } })
  .withResponse();

const stream = await client.chat.completions.create({
  model: "policy",
  messages,
  stream: true,
  stream_options: { include_usage: true },
});
const streamed = { id: "", parts: [], usage: null, finish_reason: null };
for await (const chunk of stream) {
  streamed.id = chunk.id;
  streamed.usage ??= chunk.usage;
  streamed.finish_reason ??= chunk.choices[0]?.finish_reason;
  if (chunk.choices[0]?.delta?.content) streamed.parts.push(chunk.choices[0].delta.content);
}

async function post(path, body) {
  const headers = { "content-type": "application/json", authorization: `Bearer ${key}` };
  const reply = await fetch(`${url}${path}`, { method: "POST", headers, body: JSON.stringify(body) });
  if (!reply.ok) throw new Error(`${path}: ${reply.status} ${await reply.text()}`);
  return reply.json();
}

const feedback = await post("/feedback", { msg_ids: [answer.id, streamed.id], reward: 1.0, comment: "from Node" });
const committed = await post("/commit", {});
const models = (await client.models.list()).data.map((model) => model.id);
console.log(JSON.stringify({
  answer, version: response.headers.get("x-policy-version"), streamed, feedback, committed, models,
}));
