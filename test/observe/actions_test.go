// SPDX-License-Identifier: Apache-2.0

//go:build linux && engines

package observe

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/fairlead/fairlead/internal/config/forwards"
	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/status"
	"github.com/fairlead/fairlead/internal/testkit/enginetest"
	"github.com/fairlead/fairlead/internal/testkit/wait"
	"github.com/fairlead/fairlead/test/kit/echo"
)

// What a person sees of what can be done.
const (
	doable  = `[...document.querySelectorAll('#detail .actions > :not([hidden]) :is(button, a), #detail .actions > form:not([hidden]) button')].map((b) => b.textContent).join(', ')`
	told    = `document.querySelector('#detail .said').innerText`
	refusal = `document.querySelector('#detail .failed').innerText`
	added   = `[...document.querySelectorAll('#added:not([hidden]) li')].map((li) => [...li.querySelectorAll('code, span')].map((e) => e.textContent).filter(Boolean).join(': ')).join(' | ')`
)

// changesRig is a host with one guest, in which two containers and a process have ports, and
// other machines.
func changesRig(t *testing.T) (r *rig, host *status.Client) {
	t.Helper()
	publishing := func(letter, name, port string) string {
		return fmt.Sprintf(`{"Id":"%s","Name":"/%s","Names":["/%[2]s"],"State":{"Status":"running","Running":true},"HostConfig":{},"Config":{},
			"NetworkSettings":{"Networks":{},"Ports":{"80/tcp":[{"HostIp":"0.0.0.0","HostPort":"%s"}]}}}`, strings.Repeat(letter, 64), name, port)
	}
	state := t.TempDir()
	r = newRig(t, "--source", "socket,docker", "--docker-host", enginetest.Docker(t, publishing("a", "my_web", "8081"), publishing("b", "<img src=x id=e>", "8082")),
		"--forwards-file", filepath.Join(state, "guest.json"))
	r.listen("127.0.0.1:8080")
	for _, at := range []string{"0.0.0.0:8081", "0.0.0.0:8082"} { // IPv4 alone, as the engine says
		l, err := r.guest.Listen("tcp4", at)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		go echo.Serve(l)
	}
	add := exec.Command("ip", "addr", "add", "192.0.2.10/32", "dev", "lo")
	if err := errors.Join(r.outside.Start(add), add.Wait()); err != nil {
		t.Fatal(err)
	}
	r.startAgent()
	r.hostPage(t, "dev", "--bind", "asked", "--names", "127.0.0.1:8000", "--forwards-file", filepath.Join(state, "host.json"))
	return r, status.NewClient(filepath.Join(r.dir, "h", "s"))
}

// act presses the button of the detail with this text.
func (p *tab) act(text string) {
	p.t.Helper()
	p.wait("there is "+text, fmt.Sprintf(`[...document.querySelectorAll('#detail .actions button')].some((b) => b.textContent === %q && b.getClientRects().length > 0)`, text), true)
	p.eval(fmt.Sprintf(`[...document.querySelectorAll('#detail .actions button')].find((b) => b.textContent === %q).click()`, text))
}

// reach waits until a port of the host answers, or does not.
func (r *rig) reach(address string, want bool) {
	r.t.Helper()
	wait.Within(r.t, limit(), fmt.Sprintf("%s answers: %v", address, want), func() error {
		c, err := r.outside.Dial("tcp", address)
		if err == nil {
			_ = c.Close()
		}
		if (err == nil) != want {
			return fmt.Errorf("dial: %w", errors.Join(err, errors.New("not so yet")))
		}
		return nil
	})
}

// ruleNames are the requests that were made, by name.
func ruleNames(t *testing.T, c *status.Client) (list []string) {
	t.Helper()
	f, err := c.Forwards(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range f.Requests {
		list = append(list, r.Request.String())
	}
	return list
}

// The page of a host does what the command line does, at once, with the same rules and the
// same refusals.
func TestPageActions(t *testing.T) {
	r, host := changesRig(t)
	url, err := host.WebAddress(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c := newChromium(t, r.outside)
	p := c.open(t, url.URL, 1280, 900)
	p.wait("the ports", portsIn, "8080 8081 8082")
	detail := func(port string) {
		t.Helper()
		p.eval(fmt.Sprintf(rowOf+`.click()`, port))
		p.wait("the detail of "+port, `document.querySelector('#detail h2').textContent`, port+"tcp")
	}
	row := func(port, state string) {
		t.Helper()
		p.wait(port+" is "+state, fmt.Sprintf(rowOf+`?.querySelector('.badge').textContent`, port), state)
	}
	rules := func(want ...string) {
		t.Helper()
		if got := ruleNames(t, host); !slices.Equal(got, want) {
			t.Errorf("rules %q, want %q", got, want)
		}
	}

	t.Run("deny, and undo it", func(t *testing.T) {
		detail("8080")
		p.wait("what can be done", doable, "Open in browser, Deny, Forward, Expose")
		p.act("Deny")
		row("8080", "denied")
		p.wait("it says what was done", told, "Added: deny 8080/tcp")
		p.wait("and what can be undone", doable, "Allow")
		p.wait("the rule is listed", added, "deny 8080/tcp")
		r.reach("127.0.0.1:8080", false)
		rules("deny 8080/tcp")
		p.shoot("denied")
		p.act("Allow")
		row("8080", "active")
		r.reach("127.0.0.1:8080", true)
		p.wait("nothing is listed", added, "")
		rules()
	})

	t.Run("another host port, and the reason where it cannot be had", func(t *testing.T) {
		detail("8080")
		p.click(`#detail [data-act="forward"] input`)
		p.write("18080")
		p.key("Enter")
		p.wait("it is there", fmt.Sprintf(rowText+`.includes('127.0.0.1:18080')`, "8080"), true)
		p.wait("the rule is listed", added, "forward 8080/tcp: to host port 18080")
		p.wait("the link leads there", `document.querySelector('#detail a.button').href`, "http://127.0.0.1:18080/")
		r.reach("127.0.0.1:18080", true)
		detail("8081")
		p.click(`#detail [data-act="forward"] input`)
		p.write("18080")
		p.eval(`document.querySelector('#detail [data-act="forward"]').requestSubmit()`)
		p.wait("the reason is that of the command line", refusal, `host port 18080 is taken by "forward 8080/tcp": choose another one with --to, or remove that`)
		p.wait("what was typed remains", `document.querySelector('#detail [data-act="forward"] input').value`, "18080")
		p.shoot("refused")
		detail("8080")
		p.wait("the refusal was of another port", refusal, "")
		p.act("Undo the forward to 18080")
		p.wait("it is where it was", fmt.Sprintf(rowText+`.includes('127.0.0.1:8080')`, "8080"), true)
		rules()
	})

	t.Run("to other machines for a time, in red", func(t *testing.T) {
		detail("8080")
		p.eval(`document.querySelector('#detail select').value = '900'`)
		p.act("Expose")
		p.wait("it says where", `/8080\/tcp is open to other machines until .*: 192\.0\.2\.10:8080/.test(`+told+`)`, true)
		p.wait("and that a firewall may refuse", `/firewall of the host may still refuse others/.test(`+told+`)`, true)
		red := fmt.Sprintf(rowOf+`?.querySelector('.host a')`, "8080")
		p.wait("the address is in red", `getComputedStyle(`+red+`).color`, p.eval(`(() => {
			const e = document.querySelector('#detail .failed'); return getComputedStyle(e).color; })()`))
		p.wait("with words", fmt.Sprintf(rowText+`.includes('open to other machines until')`, "8080"), true)
		p.wait("the rule has its end", `/^expose 8080\/tcp: open to other machines until /.test(`+added+`)`, true)
		p.shoot("exposed")
		r.reach("192.0.2.10:8080", true)
		p.act("End the exposure")
		p.wait("it is no more", fmt.Sprintf(rowOf+`?.querySelector('.exposed') === null`, "8080"), true)
		r.reach("192.0.2.10:8080", false)
		rules()
	})

	t.Run("containers together, and all ports of one", func(t *testing.T) {
		p.click("#group")
		p.wait("groups", `[...document.querySelectorAll('tr.group')].map((tr) => tr.querySelector('b').textContent).join(', ')`, "<img src=x id=e>, my_web, Processes")
		p.wait("rows below them", portsIn, "8082 8081 8080")
		const press = `[...document.querySelectorAll('tr.group')].find((tr) => tr.querySelector('b').textContent === '%s').querySelector('button').click()`
		p.eval(fmt.Sprintf(press, "<img src=x id=e>"))
		row("8082", "denied")
		rules("deny owner <img src=x id=e>")
		p.wait("the name is text", added, "deny owner <img src=x id=e>")
		if n := p.eval(`document.querySelectorAll('#e').length`); n != 0.0 {
			t.Errorf("%v elements came from a name", n)
		}
		p.shoot("grouped")
		p.eval(fmt.Sprintf(press, "<img src=x id=e>")) // now it allows
		row("8082", "active")
		if n := p.eval(`[...document.querySelectorAll('tr.group')].find((tr) => tr.querySelector('b').textContent === 'Processes').querySelector('button').hidden`); n != true {
			t.Error("processes can be denied by a name")
		}
		p.click("#group")
		p.wait("no groups", `document.querySelectorAll('tr.group').length`, 0)
		rules()
	})

	t.Run("filters by kind of owner", func(t *testing.T) {
		p.click(`[data-filter="owner:container"]`)
		p.wait("processes alone", portsIn, "8080")
		p.click(`[data-filter="owner:container"]`)
		p.wait("all again", portsIn, "8080 8081 8082")
	})

	t.Run("all ports", func(t *testing.T) {
		p.click("#deny-all")
		row("8080", "denied")
		row("8081", "denied")
		rules("deny all")
		p.wait("it can be undone there", `document.querySelector('#deny-all').textContent`, "Allow all")
		detail("8080")
		p.wait("and here", doable, "Allow all")
		p.click("#deny-all")
		row("8081", "active")
		rules()
	})

	t.Run("by keyboard, which keeps the focus", func(t *testing.T) {
		detail("8080")
		p.eval(`document.querySelector('#detail [data-id="deny"]').focus()`)
		p.key("Enter")
		row("8080", "denied")
		p.wait("the focus is on what undoes it", `document.activeElement.textContent`, "Allow")
		p.key("Enter")
		row("8080", "active")
		p.wait("and back", `document.activeElement.textContent`, "Deny")
		p.eval(`document.querySelector('#detail [data-act="forward"] input').focus()`)
		p.write("1")
		r.listen("127.0.0.1:8090") // the table changes meanwhile
		p.wait("another port", portsIn, "8080 8081 8082 8090")
		p.write("9")
		p.wait("what is typed remains", `document.activeElement.value`, "19")
		p.key("Escape")
		p.wait("Escape closes the detail", `document.getElementById('detail').hidden`, true)
	})

	t.Run("what the command line changes is shown", func(t *testing.T) {
		q := forwards.Request{Op: forwards.Forward, Protocol: port.TCP, Port: 3000}
		if _, err := host.ChangeForwards(t.Context(), q); err != nil {
			t.Fatal(err)
		}
		p.wait("the forward that waits", added, "forward 3000/tcp: nothing serves it yet")
		r.listen("127.0.0.1:3000")
		p.wait("it waits no more", added, "forward 3000/tcp")
		p.click(`#added [data-rule="forward 3000/tcp"] button`)
		p.wait("nothing is listed but what was done", `document.querySelector('#added .said').innerText + `+added, "Removed: forward 3000/tcp")
		rules()
	})

	t.Run("names", func(t *testing.T) {
		p.wait("where they are", `document.querySelector('#names a')?.href`, "http://localhost:8000/")
		detail("8081")
		p.wait("the container's", `[...document.querySelectorAll('#detail dd a')].map((a) => a.href).join(' ')`, "http://127.0.0.1:8081/ http://my-web.localhost:8000/")
	})

	t.Run("fits a window of 390 pixels", func(t *testing.T) {
		p := c.open(t, url.URL, 390, 800)
		p.wait("rows are there", portsIn+`.includes('8080')`, true)
		p.click("#group")
		p.wait("groups", `document.querySelectorAll('tr.group').length`, 3)
		p.eval(`document.querySelector('tr.group button').click()`)
		p.wait("the rule is listed", added, "deny owner <img src=x id=e>")
		const fits = `JSON.stringify([...document.querySelectorAll('html, header, .tools *, #added, #added *, tr, th, tr.group *, #detail, #detail *')].filter((e) =>
			!e.closest('thead, .hidden') && e.getBoundingClientRect().right > innerWidth || e.tagName === 'HTML' && e.scrollWidth > e.clientWidth).map((e) => [e.tagName, e.className]))`
		p.wait("nothing reaches beyond", fits, "[]")
		p.shoot("narrow-groups")
		p.eval(`document.querySelector('tr.group button').click()`)
		// Not with the mouse: where rows still move, it opens another one, which then covers them all.
		p.eval(`document.querySelector('[data-key*="|8080"]').click()`)
		p.wait("what can be done", doable, "Open in browser, Deny, Forward, Expose")
		p.wait("nothing of it reaches beyond", fits, "[]")
		p.shoot("narrow-actions")
		p.noConsole()
	})

	p.noConsole("409")

	t.Run("a page that only reads", func(t *testing.T) {
		p := c.open(t, url.ReadOnly, 1280, 800)
		p.wait("the ports", portsIn+`.includes('8080')`, true)
		p.eval(fmt.Sprintf(rowOf+`.click()`, "8080"))
		p.wait("nothing but looking", doable, "Open in browser")
		p.wait("and why", `document.querySelector('#detail .hint').textContent`, "this page changes nothing: the token in its address is one that only reads; `fairlead web` prints the address of one that does")
		p.wait("nor for all", `document.querySelector('#deny-all').hidden`, true)
		got := p.eval(`fetch('/v1/forwards', {method: 'POST', headers: {'Content-Type': 'application/json', Authorization: 'Bearer ' + sessionStorage.getItem('fairlead-token')}, body: '{"op":"deny","all":true}'}).then((r) => r.status)`)
		if got != 403.0 {
			t.Errorf("the server: %v", got)
		}
		rules()
		p.noConsole("403")
	})

	t.Run("a page of another port changes nothing", func(t *testing.T) {
		p := c.open(t, "http://localhost:8000/", 800, 600) // the list of names
		base, token, _ := strings.Cut(url.URL, "/#token=")
		for _, q := range []string{
			`{method: 'POST', headers: {'Content-Type': 'application/json', Authorization: 'Bearer ` + token + `'}, body: '{"op":"deny","all":true}'}`,
			`{method: 'POST', mode: 'no-cors', headers: {'Content-Type': 'text/plain'}, body: '{"op":"deny","all":true}'}`,
		} {
			_ = p.eval(`fetch('` + base + `/v1/forwards', ` + q + `).then((r) => r.type, () => 'refused')`)
		}
		rules()
	})
}

// An agent that does not answer does not hold up what is asked for afterwards.
func TestPageDoesNotWaitForEver(t *testing.T) {
	r := newRig(t, "--forwards-file", filepath.Join(t.TempDir(), "guest.json")).start()
	r.listen("127.0.0.1:8080")
	p := r.page(newChromium(t, r.guest), t, 1280, 800)
	p.wait("the port", portsIn, "8080")
	p.eval(`{const after = AbortSignal.timeout.bind(AbortSignal); AbortSignal.timeout = () => after(100)}`)
	r.agent.Signal(syscall.SIGSTOP)
	p.eval(fmt.Sprintf(rowOf+`.click()`, "8080"))
	p.act("Deny")
	p.wait("it says so", refusal, "no answer: the connection was lost, and the change may have been made")
	p.eval(`AbortSignal.timeout = () => undefined`)
	r.agent.Signal(syscall.SIGCONT)
	p.wait("what is asked for then is done", `import('/page/changes.js').then((m) => m.send({op: 'deny', port: 8080, protocol: 'tcp'})).then((r) => r.error ?? 'done')`, "done")
}

// The page of an agent does what can be done in the guest, and says where the rest is done.
func TestPageActionsInTheGuest(t *testing.T) {
	r := newRig(t, "--forwards-file", filepath.Join(t.TempDir(), "guest.json")).start()
	r.listen("127.0.0.1:8080")
	udp, err := r.guest.ListenPacket("udp", "0.0.0.0:5353")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = udp.Close() })
	p := r.page(newChromium(t, r.guest), t, 1280, 800)
	p.wait("the ports", portsIn, "5353 8080")
	p.eval(fmt.Sprintf(rowOf+`.click()`, "8080"))
	p.wait("what can be done", doable, "Open in browser, Deny, Forward")
	p.wait("and where the rest is", `/^Only a host /.test(document.querySelector('#detail .hint').textContent)`, true)
	p.act("Deny")
	p.wait("denied", fmt.Sprintf(rowOf+`?.querySelector('.badge').textContent`, "8080"), "denied")
	r.reach("127.0.0.1:8080", false)
	p.act("Allow")
	p.wait("active", fmt.Sprintf(rowOf+`?.querySelector('.badge').textContent`, "8080"), "active")
	p.eval(fmt.Sprintf(rowOf+`.click()`, "5353")) // denied by default
	p.wait("it can be allowed", doable, "Allow")
	p.act("Allow")
	p.wait("active", fmt.Sprintf(rowOf+`?.querySelector('.badge').textContent`, "5353"), "active")
	p.wait("and what undoes it", doable, "Deny, Undo allow")
	p.act("Undo allow")
	p.wait("denied again", fmt.Sprintf(rowOf+`?.querySelector('.badge').textContent`, "5353"), "denied")
	p.noConsole()
}

// container is a running container for the API of a Docker, that publishes nothing.
func container(letter, name, address string) string {
	return fmt.Sprintf(`{"Id":"%s","Name":"/%s","Names":["/%[2]s"],"State":{"Status":"running","Running":true},"HostConfig":{},"Config":{},
		"NetworkSettings":{"Networks":{"bridge":{"IPAddress":"%[3]s"}},"Ports":{}}}`, strings.Repeat(letter, 64), name, address)
}

// bridge gives a guest a network, in which nothing answers, for the addresses of containers.
func (r *rig) bridge() {
	r.t.Helper()
	cmd := exec.Command("sh", "-ec", "ip link add c0 type bridge; ip addr add 172.30.0.1/24 dev c0; ip link set c0 up")
	if err := errors.Join(r.guest.Start(cmd), cmd.Wait()); err != nil {
		r.t.Fatal(err)
	}
}

// What is done to a port that was asked for by name is done to it alone, not to another one
// with its number; what is done to a port of one guest is not done to that of another.
func TestPageActionsByNameAndGuest(t *testing.T) {
	state := t.TempDir()
	r := newRig(t, "--source", "socket,docker", "--docker-host", enginetest.Docker(t, container("a", "web", "172.30.0.2")),
		"--forwards-file", filepath.Join(state, "guest.json"))
	lab := newRig(t, "--source", "socket,docker", "--docker-host", enginetest.Docker(t, container("b", "db", "172.30.0.3")))
	for _, g := range []*rig{r, lab} {
		g.bridge()
		g.startAgent()
	}
	r.listen("127.0.0.1:80")
	url := r.hostPage(t, "dev", "--connect", "lab=unix://"+filepath.Join(lab.dir, "l", "s"), "--forwards-file", filepath.Join(state, "host.json"),
		"--names-tls", "127.0.0.1:8443")
	host := status.NewClient(filepath.Join(r.dir, "h", "s"))
	p := newChromium(t, r.outside).open(t, url, 1280, 900)
	const (
		web, ownPort, ofLab = "dev|tcp|172.30.0.2|80", "dev|tcp|127.0.0.1|80", "lab|tcp|127.0.0.1|80"
		rowAt               = `document.querySelector('#ports tbody tr[data-key="%s"]:not([data-mark="gone"])')`
	)
	row := func(key, want string) { // "" for no row
		t.Helper()
		p.wait(fmt.Sprintf("%s is %q", key, want), fmt.Sprintf(rowAt+`?.querySelector('.badge').textContent ?? ''`, key), want)
	}
	detail := func(key string) {
		t.Helper()
		p.wait("the row of "+key, fmt.Sprintf(rowAt+` !== null`, key), true)
		p.eval(fmt.Sprintf(rowAt+`.click()`, key))
		p.wait("its detail", `document.querySelector('#ports tr[aria-current]')?.dataset.key`, key)
	}
	rules := func(want ...string) {
		t.Helper()
		wait.Within(t, limit(), "the rules", func() error {
			if got := ruleNames(t, host); !slices.Equal(got, want) {
				return fmt.Errorf("rules %q, want %q", got, want)
			}
			return nil
		})
	}
	add := func(c *status.Client, q forwards.Request) {
		t.Helper()
		q.Op = forwards.Forward
		if _, err := c.ChangeForwards(t.Context(), q); err != nil {
			t.Fatal(err)
		}
	}
	p.wait("both guests", `document.querySelectorAll('#peers li[data-state="live"]').length`, 2)
	row(ownPort, "active")
	lab.listen("127.0.0.1:80")
	row(ofLab, "conflict") // the other guest has the host port

	remove := func() {
		t.Helper()
		if _, err := r.client().ChangeForwards(t.Context(), forwards.Request{Op: forwards.Remove, Demand: "web:80"}); err != nil {
			t.Fatal(err)
		}
		row(web, "")
		rules()
	}

	t.Run("one that was asked for in the guest", func(t *testing.T) {
		add(r.client(), forwards.Request{Demand: "web:80", To: 8088})
		row(web, "active")
		detail(web)
		p.wait("what can be done", doable, "Open in browser, Deny, Deny all of web, Forward")
		p.wait("its name, which only TLS serves", `[...document.querySelectorAll('#detail dd a')].map((a) => a.href).join(' ')`, "http://127.0.0.1:8088/ https://web.localhost:8443/")
		p.wait("so that there is no list", `!document.getElementById('names').hidden && document.querySelector('#names a') === null`, true)
		p.act("Deny")
		row(web, "denied")
		row(ownPort, "active")
		rules("deny web:80/tcp of guest dev")
		p.wait("what can be done now", doable, "Allow, Deny all of web")
		p.act("Allow")
		row(web, "active")
		rules()
		p.shoot("by-name")
		p.click(`#detail [data-act="forward"] input`)
		p.write("18080")
		p.key("Enter")
		p.wait("it is there", fmt.Sprintf(rowAt+`?.innerText.includes('127.0.0.1:18080')`, web), true)
		p.wait("the other port is where it was", fmt.Sprintf(rowAt+`?.innerText.includes('127.0.0.1:80')`, ownPort), true)
		rules("forward web:80/tcp of guest dev")
		p.wait("it is listed", added, "forward web:80/tcp of guest dev: to host port 18080")
		p.act("Undo the forward to 18080")
		p.wait("it is where it was", fmt.Sprintf(rowAt+`?.innerText.includes('127.0.0.1:8088')`, web), true)
		remove()
	})

	t.Run("what acts on all ports with its number is named so", func(t *testing.T) {
		add(r.client(), forwards.Request{Demand: "web:80", To: 8088})
		row(web, "active")
		if _, err := host.ChangeForwards(t.Context(), forwards.Request{Op: forwards.Deny, Protocol: port.TCP, Port: 80}); err != nil {
			t.Fatal(err)
		}
		row(web, "denied")
		detail(web)
		p.act("Allow 80/tcp")
		row(web, "active")
		remove()
	})

	t.Run("one that waits, and why", func(t *testing.T) {
		add(host, forwards.Request{Demand: "gone:80", Guest: "lab"})
		p.wait("the reason", added, "forward gone:80/tcp of guest lab: the guest publishes nothing by this name: add the forward there")
		p.click(`#added [data-rule="forward gone:80/tcp of guest lab"] button`)
		p.wait("nothing is listed but what was done", `document.querySelector('#added .said').innerText + `+added, "Removed: forward gone:80/tcp of guest lab")
		rules()
	})

	t.Run("of one guest alone", func(t *testing.T) {
		detail(ownPort)
		p.act("Deny")
		row(ownPort, "denied")
		row(ofLab, "active") // it has the host port now
		rules("deny 80/tcp of guest dev")
		detail(ofLab)
		p.wait("nothing of the other guest", doable, "Open in browser, Deny, Forward, Expose")
		p.act("Deny")
		row(ofLab, "denied")
		rules("deny 80/tcp of guest dev", "deny 80/tcp of guest lab")
		p.act("Allow")
		row(ofLab, "active")
		rules("deny 80/tcp of guest dev")
		p.shoot("two-guests")
		p.click(`#added [data-rule="deny 80/tcp of guest dev"] button`)
		p.wait("it is allowed", fmt.Sprintf(rowAt+`?.querySelector('.badge').textContent !== 'denied'`, ownPort), true)
		rules()
	})
	p.noConsole()
}
