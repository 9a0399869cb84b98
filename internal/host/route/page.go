// SPDX-License-Identifier: Apache-2.0

package route

import (
	"cmp"
	"encoding/json"
	"fmt"
	"html"
	"net/http"
	"strings"

	"github.com/fairlead/fairlead/internal/port"
	"github.com/fairlead/fairlead/internal/port/names"
)

// contentPolicy lets a page load nothing but its own style, and be framed by nobody.
const contentPolicy = "default-src 'none'; style-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

const style = `body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color-scheme: light dark }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .3rem 1rem .3rem 0; vertical-align: top; border-bottom: 1px solid #8884 }
`

// headers isolates what this program itself answers from the pages of ports.
func headers(w http.ResponseWriter, kind string) {
	h := w.Header()
	h.Set("Content-Type", kind+"; charset=utf-8")
	h.Set("Content-Security-Policy", contentPolicy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("X-Frame-Options", "DENY")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
}

// refuse answers a line.
func refuse(w http.ResponseWriter, code int, text string) {
	headers(w, "text/plain")
	w.WriteHeader(code)
	_, _ = fmt.Fprintln(w, text)
}

// choose answers names to choose from.
func (r *Router) choose(w http.ResponseWriter, q *http.Request, code int, text string, list []string) {
	headers(w, "text/html")
	w.WriteHeader(code)
	var b strings.Builder
	begin(&b, q.Host, "")
	fmt.Fprintf(&b, "<p>%s</p>\n<ul>\n", html.EscapeString(text))
	for _, name := range list {
		fmt.Fprintf(&b, "<li>%s</li>\n", r.anchor(name, q))
	}
	b.WriteString("</ul>\n</html>\n")
	_, _ = w.Write([]byte(b.String()))
}

func begin(b *strings.Builder, title, more string) {
	title = html.EscapeString(title)
	fmt.Fprintf(b, "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n"+
		"<title>%s</title>\n<link rel=\"icon\" href=\"data:,\">\n%s<h1>%s</h1>\n", title, more, title)
}

// anchor is a link to a whole name; of port 443 by the one that certificates have.
func (r *Router) anchor(name string, q *http.Request) string {
	part, _ := names.FromHost(name, r.opt.Domain)
	found := r.Table().Find(part, usualHTTP)
	if found.Outcome == names.Leads && found.Port.Key.Port == TLSPort {
		return r.linkTo(cmp.Or(r.Table().NameOf(found.Port), name), name, TLSPort, q)
	}
	return r.linkTo(name, name, usualHTTP, q)
}

// page serves the list of names to this machine, under the name localhost or a loopback
// address alone: no other site can have a browser read it.
func (r *Router) page(w http.ResponseWriter, q *http.Request) {
	site := q.Header.Get("Sec-Fetch-Site")
	switch {
	case q.Method != http.MethodGet && q.Method != http.MethodHead:
		refuse(w, http.StatusMethodNotAllowed, "This page can only be read.")
	case q.URL.Path == "/":
		headers(w, "text/html")
		_, _ = w.Write([]byte(r.list(q)))
	case q.URL.Path == "/names.css":
		headers(w, "text/css")
		_, _ = w.Write([]byte(style))
	case q.URL.Path == "/names.json" && (site == "" || site == "same-origin" || site == "none"):
		headers(w, "application/json")
		_ = json.NewEncoder(w).Encode(r.Report())
	case q.URL.Path == "/names.json":
		refuse(w, http.StatusForbidden, "This is for the page itself.")
	default:
		refuse(w, http.StatusNotFound, "There is nothing here.")
	}
}

// list is the page. Names of owners and guests are not trusted.
func (r *Router) list(q *http.Request) string {
	var b strings.Builder
	begin(&b, "Names of published ports", "<link rel=\"stylesheet\" href=\"/names.css\">\n")
	entries := r.Table().Entries()
	if len(entries) == 0 {
		b.WriteString("<p>No container or Service has a published TCP port.</p>\n</html>\n")
		return b.String()
	}
	b.WriteString("<table>\n<tr><th>Name<th>Ports<th>Owner<th>Guest\n")
	for _, e := range entries {
		fmt.Fprintf(&b, "<tr><td>%s<td>%s<td>%s<td>%s\n", r.nameCell(&e, q), r.portCell(&e, q), html.EscapeString(ownerText(&e)), html.EscapeString(e.Guest))
	}
	b.WriteString("</table>\n</html>\n")
	return b.String()
}

// nameCell lists the names of an owner, and says which ones are no use.
func (r *Router) nameCell(e *names.Entry, q *http.Request) string {
	var parts []string
	for _, name := range e.Names {
		n := uint16(usualHTTP)
		if len(e.Ports) == 1 {
			n = e.Ports[0]
		}
		parts = append(parts, r.linkTo(name, name, n, q))
	}
	for _, name := range e.Ambiguous {
		parts = append(parts, html.EscapeString(name)+" (others have it, too)")
	}
	return strings.Join(parts, "<br>")
}

// portCell lists the ports of an owner, each with its link.
func (r *Router) portCell(e *names.Entry, q *http.Request) string {
	var parts []string
	for _, n := range e.Ports {
		text := fmt.Sprint(n)
		switch {
		case len(e.Names) == 0:
		case n == TLSPort: // by the name that certificates have
			text = r.linkTo(e.Names[0], text, n, q)
		default:
			text = r.linkTo(text+"."+e.Names[0], text, n, q)
		}
		parts = append(parts, text)
	}
	return strings.Join(parts, ", ")
}

// linkTo is a text that is a link to port n of a guest by a name; of port 443 over TLS, if that is
// served.
func (r *Router) linkTo(name, text string, n uint16, q *http.Request) string {
	url := "http://" + withPort(name, q)
	if n == TLSPort {
		url = r.URL(name, n)
	}
	if text = html.EscapeString(text); url == "" {
		return text
	}
	return fmt.Sprintf(`<a href="%s/">%s</a>`, html.EscapeString(url), text)
}

func ownerText(e *names.Entry) string {
	name := e.OwnerName
	if e.Kind == port.OwnerService && e.Namespace != "" {
		name = e.Namespace + "/" + name
	}
	return fmt.Sprintf("%s %q", e.Kind, name)
}
